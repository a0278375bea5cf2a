// Reads tensors from open files on the thread pool, and packs weights while it does.
//
// Each task reads the rows of one panel into its thread's own memory, converts them there and lays
// them into the panel: nothing of the size of a tensor is held beside the result. Files are read,
// not mapped: one that ends early is an error, where a map of it would kill the process.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "linear/packed_weight.h"
#include "weights/stored.h"

namespace aioserve::weights {

// A tensor in a file, row after row; `label` names both in errors.
struct Source {
    int file;
    int64_t offset;
    int64_t rows;
    Stored type;
    std::string label;
};

// Tensors are added, then `run` reads them in that order, while other threads wait for them. All
// results have one dtype. Nothing is packed in float16.
class WeightReader {
  public:
    explicit WeightReader(Stored dtype);
    ~WeightReader();
    WeightReader(const WeightReader&) = delete;
    WeightReader& operator=(const WeightReader&) = delete;

    // Each returns the tensor's number, from 0 on. `sources` are stacked along their rows; `columns` are
    // the numbers in a row. The files stay open until `run` has returned.
    //
    // A packed weight [rows, columns] with the bias that `biases` hold, or none. Throws
    // std::invalid_argument in float16.
    int64_t add_packed(std::vector<Source> sources, int64_t columns, std::vector<Source> biases);
    // The same of one source, whose rows are the weight's columns.
    int64_t add_transposed(Source source, int64_t columns, std::vector<Source> biases);
    // A plain array at `to`, which stays there until `run` has returned.
    int64_t add_plain(std::vector<Source> sources, int64_t columns, char* to);

    // Once. Does not throw: who waits is told.
    void run();
    // `run` returns after the tensor that it is at; who waits for a later one is told.
    void stop() { stopping_.store(true); }
    // Returns how many tensors are read once there are more than `done`. Throws what kept `run`
    // from it: std::runtime_error with the label of a source, or std::bad_alloc.
    int64_t wait(int64_t done);
    // What is packed, once; null for a plain array. Waits for it.
    std::unique_ptr<linear::PackedWeight> take(int64_t number);

  private:
    struct Job;

    void read(Job& job) const;
    int64_t add(Job job);
    bool packs_bfloat16() const;
    void read_packed(Job& job) const;
    void read_transposed(Job& job) const;
    void read_plain(const std::vector<Source>& sources, int64_t columns, char* to) const;
    void set_bias(Job& job) const;

    Stored dtype_;
    std::vector<std::unique_ptr<Job>> jobs_;
    std::atomic<bool> stopping_{false};
    std::mutex mutex_;
    std::condition_variable advanced_;
    int64_t done_ = 0;
    std::exception_ptr error_;
};

// Whether two stretches of files hold the same bytes. Throws std::runtime_error as above.
bool same_bytes(const Source& one, const Source& other, int64_t count);

}  // namespace aioserve::weights

#include "weights/reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "common/scratch.h"
#include "common/thread_pool.h"

namespace aioserve::weights {
namespace {

using linear::PackedWeight;

constexpr int64_t kPieceBytes = 256 * 1024;  // of a plain array; stays in the L2 cache

[[noreturn]] void fail(const Source& source, const std::string& why) {
    throw std::runtime_error(source.label + " can't be read: " + why);
}

void read_bytes(const Source& source, int64_t at, int64_t count, char* to) {
    while (count > 0) {
        const ssize_t got = pread(source.file, to, static_cast<std::size_t>(count),
                                  static_cast<off_t>(source.offset + at));
        if (got < 0) {
            if (errno == EINTR) continue;
            fail(source, std::generic_category().message(errno));
        }
        if (got == 0) fail(source, "the file ends early");
        at += got;
        to += got;
        count -= got;
    }
}

// Numbers [first, first + count) of the tensor, converted.
void read_numbers(const Source& source, int64_t first, int64_t count, Stored dtype, char* to) {
    const int64_t item = item_bytes(source.type);
    if (source.type == dtype) {
        read_bytes(source, first * item, count * item, to);
        return;
    }
    const int64_t most = kPieceBytes / item;
    char* piece = reinterpret_cast<char*>(scratch(kPieceBytes / 4));
    for (int64_t done = 0; done < count; done += most) {
        const int64_t now = std::min(most, count - done);
        read_bytes(source, (first + done) * item, now * item, piece);
        convert(piece, source.type, now, dtype, to + done * item_bytes(dtype));
    }
}

// `fn(task)` on the pool; the first exception of any is thrown here, once all have ended.
template <class Fn>
void parallel_for_throwing(int64_t num_tasks, Fn&& fn) {
    std::mutex mutex;
    std::exception_ptr error;
    std::atomic<bool> failed{false};
    parallel_for(num_tasks, [&](int64_t task) {
        if (failed.load(std::memory_order_relaxed)) return;
        try {
            fn(task);
        } catch (...) {
            std::lock_guard lock(mutex);
            if (!error) error = std::current_exception();
            failed.store(true, std::memory_order_relaxed);
        }
    });
    if (error) std::rethrow_exception(error);
}

int64_t rows_of(const std::vector<Source>& sources) {
    int64_t rows = 0;
    for (const Source& source : sources) rows += source.rows;
    return rows;
}

// The system reads ahead while this thread is at other things.
void announce(const std::vector<Source>& sources, int64_t columns) {
    for (const Source& source : sources)
        posix_fadvise(source.file, static_cast<off_t>(source.offset),
                      static_cast<off_t>(source.rows * columns * item_bytes(source.type)),
                      POSIX_FADV_WILLNEED);
}

}  // namespace

struct WeightReader::Job {
    std::vector<Source> sources;
    std::vector<Source> biases;
    int64_t columns;
    bool transposed;
    char* plain;  // null for a packed weight
    std::unique_ptr<PackedWeight> packed;
};

WeightReader::WeightReader(Stored dtype) : dtype_(dtype) {}

WeightReader::~WeightReader() = default;

bool WeightReader::packs_bfloat16() const {
    if (dtype_ == Stored::float16) throw std::invalid_argument("no weight is packed in float16");
    return dtype_ == Stored::bfloat16;
}

int64_t WeightReader::add(Job job) {
    jobs_.push_back(std::make_unique<Job>(std::move(job)));
    return static_cast<int64_t>(jobs_.size()) - 1;
}

int64_t WeightReader::add_packed(std::vector<Source> sources, int64_t columns,
                                 std::vector<Source> biases) {
    packs_bfloat16();
    return add({std::move(sources), std::move(biases), columns, false, nullptr, nullptr});
}

int64_t WeightReader::add_transposed(Source source, int64_t columns, std::vector<Source> biases) {
    packs_bfloat16();
    return add({{std::move(source)}, std::move(biases), columns, true, nullptr, nullptr});
}

int64_t WeightReader::add_plain(std::vector<Source> sources, int64_t columns, char* to) {
    return add({std::move(sources), {}, columns, false, to, nullptr});
}

void WeightReader::run() {
    try {
        for (std::size_t i = 0; i < jobs_.size(); ++i) {
            if (stopping_.load()) throw std::runtime_error("reading was stopped");
            if (i + 1 < jobs_.size()) announce(jobs_[i + 1]->sources, jobs_[i + 1]->columns);
            read(*jobs_[i]);
            std::lock_guard lock(mutex_);
            ++done_;
            advanced_.notify_all();
        }
    } catch (...) {
        std::lock_guard lock(mutex_);
        error_ = std::current_exception();
        advanced_.notify_all();
    }
}

int64_t WeightReader::wait(int64_t done) {
    if (done < 0 || done >= static_cast<int64_t>(jobs_.size()))
        throw std::out_of_range("no more tensors than " + std::to_string(jobs_.size()));
    std::unique_lock lock(mutex_);
    advanced_.wait(lock, [&] { return done_ > done || error_; });
    if (done_ <= done) std::rethrow_exception(error_);
    return done_;
}

std::unique_ptr<PackedWeight> WeightReader::take(int64_t number) {
    wait(number);
    std::lock_guard lock(mutex_);
    return std::move(jobs_[static_cast<std::size_t>(number)]->packed);
}

void WeightReader::read(Job& job) const {
    if (job.plain)
        read_plain(job.sources, job.columns, job.plain);
    else if (job.transposed)
        read_transposed(job);
    else
        read_packed(job);
}

void WeightReader::read_packed(Job& job) const {
    const int64_t rows = rows_of(job.sources);
    const int64_t row_bytes = job.columns * item_bytes(dtype_);
    auto packed = std::make_unique<PackedWeight>(rows, job.columns, packs_bfloat16());
    parallel_for_throwing(packed->num_panels(), [&](int64_t panel) {
        const int64_t first = panel * linear::kPanelColumns;
        const int64_t end = std::min(first + linear::kPanelColumns, rows);
        thread_local std::vector<char> gathered;
        gathered.resize(static_cast<std::size_t>((end - first) * row_bytes));
        int64_t top = 0;  // of the source, among all rows
        for (const Source& source : job.sources) {
            const int64_t from = std::max(first, top);
            const int64_t to = std::min(end, top + source.rows);
            if (from < to)
                read_numbers(source, (from - top) * job.columns, (to - from) * job.columns,
                             dtype_, gathered.data() + (from - first) * row_bytes);
            top += source.rows;
        }
        packed->set_rows(panel, gathered.data());
    });
    job.packed = std::move(packed);
    set_bias(job);
}

// Its rows are short pieces all over the tensor, so it is read in whole.
void WeightReader::read_transposed(Job& job) const {
    const int64_t item = item_bytes(dtype_);
    const int64_t inputs = job.sources.front().rows;
    std::vector<char> whole(static_cast<std::size_t>(inputs * job.columns * item));
    read_plain(job.sources, job.columns, whole.data());
    job.packed = std::make_unique<PackedWeight>(
        linear::Matrix{.data = whole.data(),
                       .rows = job.columns,
                       .columns = inputs,
                       .row_bytes = item,
                       .column_bytes = job.columns * item},
        nullptr, packs_bfloat16());
    set_bias(job);
}

void WeightReader::read_plain(const std::vector<Source>& sources, int64_t columns,
                              char* to) const {
    const int64_t item = item_bytes(dtype_);
    for (const Source& source : sources) {
        const int64_t count = source.rows * columns;
        const int64_t piece = kPieceBytes / 4;
        parallel_for_throwing((count + piece - 1) / piece, [&](int64_t task) {
            const int64_t first = task * piece;
            read_numbers(source, first, std::min(piece, count - first), dtype_,
                         to + first * item);
        });
        to += count * item;
    }
}

// Rounded to the weight's dtype, as the file's weights are, and then kept as float32.
void WeightReader::set_bias(Job& job) const {
    if (job.biases.empty()) return;
    const int64_t count = rows_of(job.biases);
    std::vector<char> bias(static_cast<std::size_t>(count * item_bytes(dtype_)));
    read_plain(job.biases, 1, bias.data());
    job.packed->set_bias(bias.data());
}

bool same_bytes(const Source& one, const Source& other, int64_t count) {
    std::atomic<bool> same{true};
    parallel_for_throwing((count + kPieceBytes - 1) / kPieceBytes, [&](int64_t task) {
        if (!same.load(std::memory_order_relaxed)) return;
        const int64_t first = task * kPieceBytes;
        const int64_t now = std::min(kPieceBytes, count - first);
        char* piece = reinterpret_cast<char*>(scratch(2 * kPieceBytes / 4));
        read_bytes(one, first, now, piece);
        read_bytes(other, first, now, piece + kPieceBytes);
        if (std::memcmp(piece, piece + kPieceBytes, static_cast<std::size_t>(now)) != 0)
            same.store(false, std::memory_order_relaxed);
    });
    return same.load();
}

}  // namespace aioserve::weights

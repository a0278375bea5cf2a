// What a step program is made of: values, ops, and the frame in which the ops of one run find them.

#pragma once

#include <cstdint>
#include <vector>

#include "common/phases.h"
#include "linear/kernel.h"
#include "ops/batch.h"
#include "ops/kv_pages.h"
#include "ops/types.h"

namespace aioserve::program {

using ValueId = int32_t;
constexpr ValueId kNoValue = -1;

// A matrix with a row for each token of the step, or for each whose logits are wanted.
struct Value {
    bool logit_rows_only;
    int64_t columns;
    int64_t row_bytes;
};

// What an op's time is counted as.
enum class Kind : int { linear, attention, rowwise };
constexpr int kNumKinds = 3;

// Tables that grow as contexts get longer: looked up anew in each run.
struct Rotation {
    const float* cos = nullptr;
    const float* sin = nullptr;
    const float* query_scale = nullptr;
    int64_t max_positions = 0;
    int64_t half = 0;
    bool interleaved = false;
};

// One step, in memory that outlives the run.
struct Inputs {
    const ops::Batch& batch;
    const ops::KVPages& pages;
    const int64_t* token_ids;  // [T]
    const char* given;         // [T, given columns]: rows of the program's dtype, or null
};

// Where the results of one step go.
struct Outputs {
    float* logits;        // [S, vocab], or null
    const uint8_t* kept;  // [S]: 0 for rows of logits that may hold anything; or null
    float* largest;       // [S]: of each row of logits, or null ...
    int64_t* columns;     // [S]: ... and where it is
    char* states;         // what is kept, or null: [T, state columns], or [S, state columns]
};

struct Frame {
    const Inputs& inputs;
    const std::vector<Value>& values;
    const std::vector<char*>& addresses;  // of values
    const std::vector<Rotation>& rotations;
    ops::DType dtype;
    char* scratch;  // of each op while it runs: as much as it asked for
    char* states;   // rows of `state_bytes`, as many as what is kept has
    int64_t state_bytes;
    Phases& phases;
    linear::AlignedMemory& own_memory;  // of ops that only know how much when they are appended

    int64_t rows(ValueId id) const {
        return values[id].logit_rows_only ? inputs.batch.num_logit_rows()
                                          : inputs.batch.num_tokens();
    }
    template <class T = void>
    T* at(ValueId id) const {
        return reinterpret_cast<T*>(addresses[id]);
    }
};

class Op {
  public:
    Op(Kind kind_, std::vector<ValueId> reads_, std::vector<ValueId> writes_)
        : kind(kind_), reads(std::move(reads_)), writes(std::move(writes_)) {}
    virtual ~Op() = default;

    // Bytes, of memory aligned to 64 bytes. Called before values have addresses.
    virtual std::size_t scratch_bytes(const Frame&) const { return 0; }
    virtual void append(const Frame& frame) const = 0;

    // Whether `append` reads results of earlier ops: what was appended before must have run.
    virtual bool reads_results() const { return false; }

    // For ops that can compute a row by itself: how, while the next layer's input is packed. The
    // context lives in `frame.phases`.
    virtual bool is_row_source() const { return false; }
    virtual linear::RowSource row_source(const Frame&) const { return {}; }

    const Kind kind;
    std::vector<ValueId> reads;   // changed in place, too
    std::vector<ValueId> writes;  // first written here
};

}  // namespace aioserve::program

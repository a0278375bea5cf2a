// What programs and ops know of a linear layer: rows go in, rows come out. How the weight lies in
// memory, and in which numbers it is multiplied, is each kernel's own.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "common/phases.h"

namespace aioserve::linear {

// Where the rows of a product come from: from `row`, which returns row `row` of `context`, contiguous
// values of the kernel's dtype, either where it lies or written to `memory` (the calling thread's,
// aligned to 64 bytes, with room for one row); or, where `row` is null, from `context` itself, where
// they lie `row_bytes` apart. Whichever thread packs a row asks for it, once per product.
struct RowSource {
    const char* (*row)(const void* context, int64_t row, char* memory);
    const void* context;
    std::ptrdiff_t row_bytes;

    static RowSource plain(const char* x, std::ptrdiff_t row_bytes) { return {nullptr, x, row_bytes}; }

    const char* at(int64_t index, char* memory) const {
        if (row) return row(context, index, memory);
        return static_cast<const char*>(context) + index * row_bytes;
    }
};

// Where results go: float32 or bfloat16 rows.
struct Rows {
    char* data;
    std::ptrdiff_t row_bytes;
    bool float32;
};

// Which rows of a product are written to y, float32 rows; the others stay as they are there.
struct KeptRows {
    float* y;                  // null: none is
    std::ptrdiff_t row_bytes;  // of y
    const uint8_t* rows;       // [rows], 0 for those that aren't; null: all are

    bool has(int64_t row) const { return y && (!rows || rows[row]); }
    char* at(int64_t row) const { return reinterpret_cast<char*>(y) + row * row_bytes; }
};

// The largest of each row as float32, and the first column that has it; NaN and its first column
// where there is one.
struct Largest {
    float* values;
    int64_t* columns;
};

// The first of the largest of a row's outputs so far; the first NaN, once there is one.
struct Best {
    float value;
    int32_t column;

    bool yields_to(float other) const { return !(other <= value) && value == value; }

    // One that comes after all so far.
    void take(const Best& next) {
        if (yields_to(next.value)) *this = next;
    }

    // The same for outputs in a row. Most hold none that is larger.
    void take(const float* outputs, int count, int32_t first_column) {
        bool any = false;
        for (int i = 0; i < count; ++i) any |= !(outputs[i] <= value);
        if (!any) return;
        for (int i = 0; i < count; ++i)
            if (yields_to(outputs[i])) *this = {outputs[i], first_column + i};
    }
};

// The calling thread's own, kept between calls, aligned to 64 bytes.
class AlignedMemory {
  public:
    char* at_least(std::size_t bytes) {
        if (size_ < bytes) {
            memory_.reset();
            size_ = 0;
            memory_.reset(static_cast<char*>(::operator new[](bytes, kAlignment)));
            size_ = bytes;
        }
        return memory_.get();
    }

  private:
    static constexpr std::align_val_t kAlignment{64};
    struct Free {
        void operator()(char* p) const { ::operator delete[](p, kAlignment); }
    };
    std::unique_ptr<char[], Free> memory_;
    std::size_t size_ = 0;
};

// y [rows, out] = x [rows, in] @ weight.T + bias, on the thread pool. Sums are float32. The result of
// a row depends on that row alone, to the bit.
class LinearKernel {
  public:
    LinearKernel(int64_t out_features, int64_t in_features, bool bfloat16)
        : out_features_(out_features), in_features_(in_features), bfloat16_(bfloat16) {}
    LinearKernel(const LinearKernel&) = delete;
    LinearKernel& operator=(const LinearKernel&) = delete;
    virtual ~LinearKernel() = default;

    // Adds the phases of the product to `phases`. `packed`, `packed_bytes(rows)` of memory aligned to
    // 64 bytes, holds the rows between them. What `x` refers to, `packed`, y and this object must
    // stay until the phases ran. Instruction set and number of threads are those of this call.
    virtual void append(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                        const Rows& y) const = 0;
    virtual std::size_t packed_bytes(int64_t rows) const = 0;

    // The same, and the largest of each row. Only the results in `kept` are written. `partial`:
    // `argmax_bytes(rows)` of memory, aligned to 64 bytes, that stays too.
    virtual void append_argmax(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                               char* partial, const KeptRows& kept,
                               const Largest& largest) const = 0;
    virtual std::size_t argmax_bytes(int64_t rows) const = 0;

    // out [count, in] = weight[ids], in the kernel's dtype. Throws std::out_of_range for an id that
    // is no row, before it writes anything.
    void gather(const int64_t* ids, int64_t count, char* out) const;

    // Run them. x has contiguous rows `x_row_bytes` apart; y is contiguous, float32 or bfloat16.
    void apply(const char* x, int64_t rows, std::ptrdiff_t x_row_bytes, char* y,
               bool y_is_float32) const;
    void argmax(const char* x, int64_t rows, std::ptrdiff_t x_row_bytes, const KeptRows& kept,
                const Largest& largest) const;

    int64_t out_features() const { return out_features_; }
    int64_t in_features() const { return in_features_; }
    // The dtype of x, of the rows that `gather` gives, and of y where that isn't float32.
    bool bfloat16() const { return bfloat16_; }
    int element_bytes() const { return bfloat16_ ? 2 : 4; }
    virtual std::size_t num_bytes() const = 0;  // of the weight and its bias

    // Row `id` of the weight, which exists, to `out` [in].
    virtual void row(int64_t id, char* out) const = 0;

  private:
    int64_t out_features_;
    int64_t in_features_;
    bool bfloat16_;
};

}  // namespace aioserve::linear

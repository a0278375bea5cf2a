// The weight of one linear layer, laid out once for the tiles, and the product with it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/phases.h"
#include "linear/packing.h"
#include "linear/tile.h"

namespace aioserve::linear {

// Where the rows of a product come from: from `row`, which returns row `row` of `context`, contiguous
// values of the weight's dtype, either where it lies or written to `memory` (the calling thread's,
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

// Which rows of a product are written to y, float32 [rows, out] contiguous; the others stay as they
// are there.
struct KeptRows {
    float* y;             // null: none is
    const uint8_t* rows;  // [rows], 0 for those that aren't; null: all are

    bool has(int64_t row) const { return y && (!rows || rows[row]); }
};

class PackedWeight {
  public:
    // Copies `weight` [out, in] and `bias` [out] (of the weight's dtype, contiguous; or null).
    PackedWeight(const Matrix& weight, const char* bias, bool bfloat16);
    // Zeros without a bias, for `set_rows` and `set_bias` to fill.
    PackedWeight(int64_t out_features, int64_t in_features, bool bfloat16);
    PackedWeight(const PackedWeight&) = delete;
    PackedWeight& operator=(const PackedWeight&) = delete;

    int64_t num_panels() const { return num_panels_; }
    // Copies the rows from 32 * panel on, dense in the weight's dtype: 32, or as many as are left.
    void set_rows(int64_t panel, const char* rows);
    // Copies `bias` [out], dense in the weight's dtype.
    void set_bias(const char* bias);

    // y [rows, out] = x [rows, in] @ weight.T + bias, on the thread pool. x has the weight's dtype
    // and contiguous rows `x_row_bytes` apart; y is contiguous, float32 or bfloat16. Sums are
    // float32. The result of a row depends on that row alone, to the bit.
    void apply(const char* x, int64_t rows, std::ptrdiff_t x_row_bytes, char* y,
               bool y_is_float32) const;

    // Adds the phases of the same product to `phases`. `packed`, `packed_bytes(rows)` of memory aligned
    // to 64 bytes, holds the rows between them. What `x` refers to, `packed`, y and this object must
    // stay until the phases ran. Instruction set and number of threads are those of this call.
    void append(Phases& phases, const RowSource& x, int64_t rows, char* packed, char* y,
                bool y_is_float32) const;
    std::size_t packed_bytes(int64_t rows) const;

    // The same, and of each row the largest result as float32, and the first column that has it; NaN
    // and its first column where there is one. Only the results in `kept` are written. `partial`:
    // `argmax_bytes(rows)` of memory, aligned to 8 bytes, that stays too.
    void append_argmax(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                       char* partial, const KeptRows& kept, float* largest, int64_t* columns) const;
    std::size_t argmax_bytes(int64_t rows) const;

    // Runs them.
    void argmax(const char* x, int64_t rows, std::ptrdiff_t x_row_bytes, const KeptRows& kept,
                float* largest, int64_t* columns) const;

    // out [count, in] = weight[ids], in the weight's dtype. Throws std::out_of_range for an id that
    // is no row, before it writes anything.
    void gather(const int64_t* ids, int64_t count, char* out) const;

    int64_t out_features() const { return out_features_; }
    int64_t in_features() const { return in_features_; }
    bool bfloat16() const { return element_bytes_ == 2; }
    std::size_t num_bytes() const { return panel_bytes_ * static_cast<std::size_t>(num_panels_); }

  private:
    struct Best;
    struct Pass;
    struct Split;

    char* panel_at(int64_t panel) const;
    std::size_t packed_row_bytes(const TileSet& tiles) const;
    int64_t most_rows_of_a_pass(const TileSet& tiles) const;
    bool is_worth_sharing(int64_t rows) const;
    void append_packing(Phases& phases, const TileSet& tiles, const RowSource& x, const Pass& pass,
                        char* packed) const;
    template <class Fn>
    void for_each_pass(int64_t rows, const RowSource& x, char* packed, const Fn& fn) const;
    Split split(const Pass& pass) const;
    void append_product(Phases& phases, const TileSet& tiles, const Pass& pass) const;
    void multiply_block(const TileSet& tiles, const Pass& pass, int64_t block, int64_t group,
                        const Split& split) const;

    int64_t out_features_;
    int64_t in_features_;
    int element_bytes_;
    int steps_;
    int64_t num_panels_;
    std::size_t panel_bytes_;
    std::shared_ptr<char> panels_;
    std::vector<float> bias_;  // to the last panel's end; empty for none
};

}  // namespace aioserve::linear

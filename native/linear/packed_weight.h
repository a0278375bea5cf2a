// The weight of one linear layer, laid out once for the tiles, and the product with it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "linear/tile.h"

namespace aioserve::linear {

// `[rows, columns]` of float32 or bfloat16 in somebody else's memory; strides in bytes.
struct Matrix {
    const char* data;
    int64_t rows;
    int64_t columns;
    std::ptrdiff_t row_bytes;
    std::ptrdiff_t column_bytes;
};

class PackedWeight {
  public:
    // Copies `weight` [out, in] and `bias` [out] (of the weight's dtype, contiguous; or null).
    PackedWeight(const Matrix& weight, const char* bias, bool bfloat16);
    PackedWeight(const PackedWeight&) = delete;
    PackedWeight& operator=(const PackedWeight&) = delete;

    // y [rows, out] = x [rows, in] @ weight.T + bias, on the thread pool. x has the weight's dtype
    // and contiguous rows `x_row_bytes` apart; y is contiguous, float32 or bfloat16. Sums are
    // float32. The result of a row depends on that row alone, to the bit.
    void apply(const char* x, int64_t rows, std::ptrdiff_t x_row_bytes, char* y,
               bool y_is_float32) const;

    // out [count, in] = weight[ids], in the weight's dtype. Throws std::out_of_range for an id that
    // is no row, before it writes anything.
    void gather(const int64_t* ids, int64_t count, char* out) const;

    std::size_t num_bytes() const { return panel_bytes_ * static_cast<std::size_t>(num_panels_); }

  private:
    struct Rows;

    void pack_panel(const Matrix& weight, int64_t panel);
    void pack_row(const char* row, char* block, int rows_in_block) const;
    void multiply(const TileSet& tiles, const Rows& rows) const;

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

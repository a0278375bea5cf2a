// How a register tile leaves its sums, for the `Vec` in scope: with the bias, as rows of y.

#pragma once

#include "linear/tile.h"
#include "simd/common.inl"

namespace aioserve::linear {
namespace {

// Sums of the panels' columns from `column` on, as many as there are. `P::store` writes some as
// bfloat16.
template <class P, int ROWS, int VECTORS>
__attribute__((always_inline)) inline void write_outputs(const Tile& t,
                                                         const Vec (&sums)[ROWS][VECTORS],
                                                         int column) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v, column += Vec::kWidth) {
            if (v == 0 && r > 0) column -= VECTORS * Vec::kWidth;
            if (column >= t.columns) continue;
            Vec sum = sums[r][v];
            if (t.bias) sum = sum + Vec::load(t.bias + column);
            char* row = t.y + r * t.y_row_bytes;
            const int columns = t.columns - column;
            if (t.y_is_float32)
                store_some(sum, reinterpret_cast<float*>(row) + column, columns);
            else
                P::store(sum, reinterpret_cast<bf16*>(row) + column, columns);
        }
}

}  // namespace
}  // namespace aioserve::linear

// Lays the rows of a weight into panels as the tiles read them (tile.h says how).

#pragma once

#include <cstddef>
#include <cstdint>

namespace aioserve::linear {

// `[rows, columns]` of float32 or bfloat16 in somebody else's memory; strides in bytes.
struct Matrix {
    const char* data;
    int64_t rows;
    int64_t columns;
    std::ptrdiff_t row_bytes;
    std::ptrdiff_t column_bytes;
};

// `weight` has at most 32 rows, which become the first columns of `panel`. What of the panel they
// don't fill stays as it is.
void pack_panel(const Matrix& weight, int element_bytes, char* panel);

}  // namespace aioserve::linear

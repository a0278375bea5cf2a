// What is done to rows without much arithmetic: picked, added, scaled, capped, searched.

#pragma once

#include <vector>

#include "common/phases.h"
#include "ops/types.h"

namespace aioserve::ops {

// to[i] = table[ids[i]], rows of `row_bytes`. Ids are checked by the caller.
void append_pick_rows(Phases& phases, const void* table, const int64_t* ids, int64_t count,
                      int64_t row_bytes, void* to);
// Rows of `row_bytes` to others that lie `to_stride` bytes apart.
void append_copy_rows(Phases& phases, const void* rows, int64_t count, int64_t row_bytes, char* to,
                      int64_t to_stride);
// to[i][columns[j]] = x[i][j] of rows of `size`; the others of the `to_size` in a row of `to` are -inf.
// The columns differ, are checked by the caller, and stay until the phases ran.
void append_spread(Phases& phases, const float* x, int64_t rows, int64_t size,
                   const int64_t* columns, int64_t to_size, float* to);
void append_add_rows(Phases& phases, const AddRowsArgs& args, DType dtype, int64_t rows);
void append_scale(Phases& phases, void* x, float factor, DType dtype, int64_t size);
void append_soft_cap(Phases& phases, float* x, float cap, int64_t size);
void append_layer_norm(Phases& phases, const LayerNormArgs& args, DType dtype, int64_t rows);
void append_activation(Phases& phases, const ActivationArgs& args, Activation kind, DType dtype,
                       int64_t rows);
// Of each row of x [rows, size]: the first of its largest values, or its first NaN, and its column.
void append_largest(Phases& phases, const float* x, int64_t rows, int64_t size, float* largest,
                    int64_t* columns);
// The same of some rows, which stay until the phases ran.
void append_largest_of(Phases& phases, const float* x, const std::vector<int64_t>& rows,
                       int64_t size, float* largest, int64_t* columns);
struct RowMask {
    int64_t row;
    const int32_t* mask;  // [ceil(size / 32)]
};
// In rows of x [any, size], what a mask doesn't have becomes -inf. The masks stay, too.
void append_leave_out(Phases& phases, float* x, const std::vector<RowMask>& masks, int64_t size);
// What either takes of one thread, roughly, in nanoseconds.
double row_search_ns(int64_t rows, int64_t size);

}  // namespace aioserve::ops

// Runs the row-by-row ops on the thread pool.

#pragma once

#include "ops/types.h"

namespace aioserve::ops {

void rms_norm(const RmsNormArgs& args, DType dtype, int64_t rows);
void gated(const GatedArgs& args, DType dtype, int64_t rows, bool gelu);

// Throws std::invalid_argument, before anything is written, where a location or position is outside
// the pages or the tables.
void rotary_kv_write(const RotaryArgs& args, DType dtype, int64_t tokens, int64_t num_slots,
                     int64_t max_positions);

}  // namespace aioserve::ops

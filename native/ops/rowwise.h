// The row-by-row ops, on the thread pool.

#pragma once

#include "common/phases.h"
#include "ops/batch.h"
#include "ops/kv_pages.h"

namespace aioserve::ops {

void append_rms_norm(Phases& phases, const RmsNormArgs& args, DType dtype, int64_t rows);
void append_gated(Phases& phases, const GatedArgs& args, DType dtype, int64_t rows, bool gelu);

void rms_norm(const RmsNormArgs& args, DType dtype, int64_t rows);
void gated(const GatedArgs& args, DType dtype, int64_t rows, bool gelu);

// What one layer asks for, beside its batch and its pages.
struct RotaryCall {
    void* qkv;  // [T, (Hq + 2 Hk) * D], rows `row_stride` elements apart; the queries change in place
    int64_t row_stride;
    int64_t q_heads;
    const float* cos;  // [max_positions, half], or null for no rotation
    const float* sin;
    int64_t max_positions;
    int64_t half;
    bool interleaved;
    const float* query_scale;  // [max_positions], or null; only with a rotation
    const void* q_norm;  // [D] or null
    const void* k_norm;
    float eps;
    float weight_offset;
};

// Throws std::invalid_argument, before anything is added, for a position outside the tables.
void append_rotary_kv_write(Phases& phases, const Batch& batch, const KVPages& pages, int64_t layer,
                            const RotaryCall& call);
void rotary_kv_write(const Batch& batch, const KVPages& pages, int64_t layer,
                     const RotaryCall& call);

}  // namespace aioserve::ops

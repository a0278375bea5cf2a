// Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1): what goes into latent pages. Attention
// over them is `ops/attention.h`'s.

#pragma once

#include "common/phases.h"
#include "ops/batch.h"
#include "ops/kv_pages.h"

namespace aioserve::ops {

// What one layer asks for, beside its batch and its pages of `rank` + `rotated` numbers a token.
struct LatentCall {
    void* queries;  // [T, Hq * (rank + rotated)]; the last `rotated` of each head are turned in place
    int64_t row_stride;
    int64_t q_heads;
    const void* latents;  // [T, rank + rotated], rows `latent_stride` elements apart
    int64_t latent_stride;
    const void* norm;  // [rank]
    float eps;
    float weight_offset;
    const float* cos;  // [max_positions, half]
    const float* sin;
    int64_t max_positions;
    int64_t half;
    bool interleaved;
};

// Throws std::invalid_argument, before anything is added, for a position outside the tables and for
// pages that aren't latent.
void append_latent_write(Phases& phases, const Batch& batch, const KVPages& pages, int64_t layer,
                         const LatentCall& call);
void latent_write(const Batch& batch, const KVPages& pages, int64_t layer, const LatentCall& call);

}  // namespace aioserve::ops

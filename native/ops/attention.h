// Runs attention over a batch on the thread pool.

#pragma once

#include "ops/batch.h"
#include "ops/types.h"

namespace aioserve::ops {

// What one layer asks for, beside its batch and its pages.
struct AttentionCall {
    const void* qkv;  // [T, (Hq + 2 Hk) * D], rows `row_stride` elements apart; the queries are read
    int64_t row_stride;
    int64_t q_heads;
    void* out;  // [T, Hq * D] contiguous
    float scale;
    float soft_cap;
    int64_t window;  // 0: none
};

void paged_attention(const Batch& batch, const KVPages& pages, int64_t layer,
                     const AttentionCall& call);

}  // namespace aioserve::ops

// Attention over a batch, on the thread pool.

#pragma once

#include "common/phases.h"
#include "ops/batch.h"
#include "ops/kv_pages.h"

namespace aioserve::ops {

// What one layer asks for, beside its batch and its pages.
struct AttentionCall {
    // [T, (Hq + 2 Hk) * D], rows `row_stride` elements apart, of which the queries are read; of latent
    // pages [T, Hq * D], queries alone.
    const void* qkv;
    int64_t row_stride;
    int64_t q_heads;
    void* out;  // [T, Hq * value_dim] contiguous, or [S, ...] with `logit_rows_only`
    float scale;
    float soft_cap;
    int64_t window;  // 0: none; at most what the layer's group keeps
    bool logit_rows_only;  // attend from the batch's logit rows alone
    const float* sinks;    // [Hq]: a score of each head without a key or value; null: none
    float* log_sum_exp;    // [rows of out, Hq]: of the scores that a row saw, and its sink; or null
};

// What may fail throws std::invalid_argument before anything is added. `partials`, of as many floats
// as `partials_of` says, is used until the phases have run.
void append_paged_attention(Phases& phases, const Batch& batch, const KVPages& pages, int64_t layer,
                            const AttentionCall& call, float* partials);
int64_t partials_of(const Batch& batch, const KVPages& pages, int64_t layer,
                    const AttentionCall& call);

void paged_attention(const Batch& batch, const KVPages& pages, int64_t layer,
                     const AttentionCall& call);

void append_merge_attention(Phases& phases, const MergeAttentionArgs& args, DType dtype,
                            int64_t rows);

}  // namespace aioserve::ops

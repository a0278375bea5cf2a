// Plans attention over a batch and runs it on the thread pool.

#pragma once

#include "ops/types.h"

namespace aioserve::ops {

struct AttentionRequest {
    AttentionArgs args;
    DType dtype;
    int64_t num_pages;
    int64_t num_sequences;
    int64_t table_width;
    int64_t num_tokens;
    const int32_t* query_start;
    const int32_t* context_lens;
    const int32_t* page_table;
};

// Throws std::invalid_argument, before anything is written, where the batch contradicts itself or
// names a page that does not exist.
void paged_attention(const AttentionRequest& request);

}  // namespace aioserve::ops

// Copies KV pages within and between caches on the thread pool.

#pragma once

#include <vector>

#include "ops/kv_pages.h"

namespace aioserve::ops {

struct PageCopy {
    int32_t source_cache, source_page, target_cache, target_page, num_tokens;
};

// One after the other, in order; the caches are alike in all but their number of pages. Throws
// std::invalid_argument, before anything is written, where they are not, or where a copy names a
// cache or a page that does not exist, or more or fewer tokens than a page can hold.
void copy_pages(const std::vector<const KVPages*>& caches, const PageCopy* copies,
                int64_t num_copies);

}  // namespace aioserve::ops

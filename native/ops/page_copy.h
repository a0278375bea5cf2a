// Copies KV pages within and between caches on the thread pool.

#pragma once

#include <cstdint>

namespace aioserve::ops {

// Pages [planes, num_pages, heads, page_size, row_bytes] contiguous; a plane is the keys or the
// values of a layer. Both caches have the same planes, heads, page size and rows.
struct PageCache {
    char* pages;
    int64_t num_pages;
};

struct PageCopy {
    int32_t source_cache, source_page, target_cache, target_page, num_tokens;
};

struct PageCopyRequest {
    const PageCache* caches;
    int64_t num_caches;
    int64_t planes, heads, page_size, row_bytes;
    const PageCopy* copies;
    int64_t num_copies;
};

// One after the other, in order. Throws std::invalid_argument, before anything is written, where a
// copy names a cache or a page that does not exist, or more or fewer tokens than a page can hold.
void copy_pages(const PageCopyRequest& request);

}  // namespace aioserve::ops

#include "ops/page_copy.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "common/thread_pool.h"

namespace aioserve::ops {
namespace {

// Nanoseconds per byte on one thread, roughly.
constexpr double kCopy = 0.15;

void check_page(const PageCopyRequest& request, int64_t copy, const char* name, int32_t cache,
                int32_t page) {
    const std::string which = "copies[" + std::to_string(copy) + "] has " + name;
    if (cache < 0 || cache >= request.num_caches)
        throw std::invalid_argument(which + " cache " + std::to_string(cache) + " of " +
                                    std::to_string(request.num_caches));
    if (page < 0 || page >= request.caches[cache].num_pages)
        throw std::invalid_argument(which + " page " + std::to_string(page) + " of " +
                                    std::to_string(request.caches[cache].num_pages));
}

}  // namespace

void copy_pages(const PageCopyRequest& request) {
    const int64_t head_bytes = request.page_size * request.row_bytes;
    const int64_t page_bytes = request.heads * head_bytes;
    int64_t tokens = 0;
    for (int64_t i = 0; i < request.num_copies; ++i) {
        const PageCopy& copy = request.copies[i];
        check_page(request, i, "source", copy.source_cache, copy.source_page);
        check_page(request, i, "target", copy.target_cache, copy.target_page);
        if (copy.num_tokens < 1 || copy.num_tokens > request.page_size)
            throw std::invalid_argument("copies[" + std::to_string(i) + "] has " +
                                        std::to_string(copy.num_tokens) +
                                        " tokens; a page holds 1 to " +
                                        std::to_string(request.page_size));
        tokens += copy.num_tokens;
    }
    const auto page_at = [&](int32_t cache, int32_t page, int64_t plane) {
        const PageCache& pages = request.caches[cache];
        return pages.pages + (plane * pages.num_pages + page) * page_bytes;
    };
    // Planes are independent of each other, so each keeps the order of the copies by itself.
    const double bytes =
        static_cast<double>(tokens * request.planes * request.heads * request.row_bytes);
    parallel_ranges(request.planes, kCopy * bytes, [&](int64_t begin, int64_t end) {
        for (int64_t plane = begin; plane < end; ++plane) {
            for (int64_t i = 0; i < request.num_copies; ++i) {
                const PageCopy& copy = request.copies[i];
                const char* source = page_at(copy.source_cache, copy.source_page, plane);
                char* target = page_at(copy.target_cache, copy.target_page, plane);
                if (source == target) continue;
                if (copy.num_tokens == request.page_size) {
                    std::memcpy(target, source, page_bytes);
                    continue;
                }
                for (int64_t head = 0; head < request.heads; ++head)
                    std::memcpy(target + head * head_bytes, source + head * head_bytes,
                                copy.num_tokens * request.row_bytes);
            }
        }
    });
}

}  // namespace aioserve::ops

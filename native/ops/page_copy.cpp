#include "ops/page_copy.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "common/thread_pool.h"

namespace aioserve::ops {
namespace {

using Caches = std::vector<const KVPages*>;

// Nanoseconds per byte on one thread, roughly.
constexpr double kCopy = 0.15;

void check_alike(const Caches& caches) {
    const KVPages& first = *caches.at(0);
    for (size_t i = 1; i < caches.size(); ++i) {
        const KVPages& other = *caches[i];
        if (other.layers_per_page != first.layers_per_page || other.heads != first.heads ||
            other.page_size != first.page_size || other.head_dim != first.head_dim ||
            other.dtype != first.dtype || other.rank != first.rank)
            throw std::invalid_argument("caches[" + std::to_string(i) +
                                        "] must be like caches[0] in all but num_pages");
    }
}

void check_page(const Caches& caches, int64_t copy, const char* name, int32_t cache, int32_t page) {
    const std::string which = "copies[" + std::to_string(copy) + "] has " + name;
    if (cache < 0 || cache >= static_cast<int64_t>(caches.size()))
        throw std::invalid_argument(which + " cache " + std::to_string(cache) + " of " +
                                    std::to_string(caches.size()));
    if (page < 0 || page >= caches[cache]->num_pages)
        throw std::invalid_argument(which + " page " + std::to_string(page) + " of " +
                                    std::to_string(caches[cache]->num_pages));
}

// The first `tokens` keys of a head.
void copy_keys(const KVPages& sizes, const char* source, char* target, int64_t tokens) {
    const int64_t stride = 4 * sizes.page_size;
    for (int64_t step = 0; step < sizes.steps(); ++step)
        std::memcpy(target + step * stride, source + step * stride, 4 * tokens);
}

// The first `tokens` rows of a latent page.
void copy_rows(const KVPages& sizes, const char* source, char* target, int64_t tokens) {
    std::memcpy(target, source, 4 * sizes.steps() * tokens);
}

// The first `tokens` values of a head. Of a pair whose first token alone is copied, the second stays.
void copy_values(const KVPages& sizes, const char* source, char* target, int64_t tokens) {
    const bool bfloat16 = sizes.dtype == DType::bfloat16;
    const int64_t row_bytes = sizes.head_dim * (bfloat16 ? 2 : 4);
    const bool in_pairs = bfloat16 && sizes.page_size % 2 == 0;
    const int64_t whole = in_pairs ? tokens / 2 * 2 : tokens;
    std::memcpy(target, source, whole * row_bytes);
    if (whole == tokens) return;
    for (int64_t i = 0; i < sizes.head_dim; ++i) {
        const int64_t at = whole * row_bytes + 4 * i;
        std::memcpy(target + at, source + at, 2);
    }
}

}  // namespace

void copy_pages(const Caches& caches, const PageCopy* copies, int64_t num_copies) {
    check_alike(caches);
    const KVPages& first = *caches[0];
    const int64_t head_bytes = first.head_bytes(), plane_bytes = first.plane_bytes();
    int64_t tokens = 0;
    for (int64_t i = 0; i < num_copies; ++i) {
        const PageCopy& copy = copies[i];
        check_page(caches, i, "source", copy.source_cache, copy.source_page);
        check_page(caches, i, "target", copy.target_cache, copy.target_page);
        if (copy.num_tokens < 1 || copy.num_tokens > first.page_size)
            throw std::invalid_argument("copies[" + std::to_string(i) + "] has " +
                                        std::to_string(copy.num_tokens) +
                                        " tokens; a page holds 1 to " +
                                        std::to_string(first.page_size));
        tokens += copy.num_tokens;
    }
    // Planes are independent of each other, so that the threads share them, and each keeps the order
    // of the copies by itself. A thread's planes of a page are one block.
    const double bytes =
        static_cast<double>(tokens) * static_cast<double>(first.page_bytes()) / first.page_size;
    parallel_ranges(first.planes_per_page(), kCopy * bytes, [&](int64_t begin, int64_t end) {
        for (int64_t i = 0; i < num_copies; ++i) {
            const PageCopy& copy = copies[i];
            const char* source = caches[copy.source_cache]->page(copy.source_page);
            char* target = caches[copy.target_cache]->page(copy.target_page);
            if (source == target) continue;
            if (copy.num_tokens == first.page_size) {
                std::memcpy(target + begin * plane_bytes, source + begin * plane_bytes,
                            (end - begin) * plane_bytes);
                continue;
            }
            for (int64_t head = begin * first.heads; head < end * first.heads; ++head) {
                const auto copy_some = first.rank                      ? copy_rows
                                       : head / first.heads % 2 == 0 ? copy_keys
                                                                       : copy_values;
                copy_some(first, source + head * head_bytes, target + head * head_bytes,
                          copy.num_tokens);
            }
        }
    });
}

}  // namespace aioserve::ops

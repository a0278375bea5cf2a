#include "ops/prefault.h"

#include <stdexcept>
#include <string>

namespace aioserve::ops {
namespace {

constexpr int64_t kLeastSystemPage = 4096;

// A write. Volatile, or the compiler may see that it changes nothing, and read in its place.
const volatile char kNothing = 0;

void touch(char* at) { __atomic_fetch_or(at, kNothing, __ATOMIC_RELAXED); }

}  // namespace

// Asking the system for all of it at once (MADV_POPULATE_WRITE of Linux) would hold the lock that
// every other thread needs to map memory, for as long as it takes.
void prefault(const KVPages& pages, int64_t first, int64_t end) {
    if (first < 0 || first > end || end > pages.num_pages)
        throw std::invalid_argument("pages [first, end) must lie in [0, " +
                                    std::to_string(pages.num_pages) + "), got [" +
                                    std::to_string(first) + ", " + std::to_string(end) + ")");
    if (first == end) return;
    char* const from = pages.page(first);
    char* const last = pages.page(end) - 1;
    for (int64_t offset = 0; offset < last - from; offset += kLeastSystemPage) touch(from + offset);
    touch(last);
}

}  // namespace aioserve::ops

#include "ops/prefault.h"

#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace aioserve::ops {

bool prefault(const KVPages& pages, int64_t plane, int64_t first, int64_t end) {
    if (plane < 0 || plane >= pages.planes())
        throw std::invalid_argument("plane must be in [0, " + std::to_string(pages.planes()) +
                                    "), got " + std::to_string(plane));
    if (first < 0 || first > end || end > pages.num_pages)
        throw std::invalid_argument("pages [first, end) must lie in [0, " +
                                    std::to_string(pages.num_pages) + "), got [" +
                                    std::to_string(first) + ", " + std::to_string(end) + ")");
#if defined(__linux__)
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers don't have
    const auto unit = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto at = reinterpret_cast<uintptr_t>(pages.plane(plane));
    const uintptr_t from = (at + first * pages.page_bytes()) / unit * unit;
    const uintptr_t to = (at + end * pages.page_bytes() + unit - 1) / unit * unit;
    return madvise(reinterpret_cast<void*>(from), to - from, kPopulateWrite) == 0;
#else
    return false;
#endif
}

}  // namespace aioserve::ops

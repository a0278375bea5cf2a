// Memory for weights: zero, aligned to 64 bytes, on huge pages where the system grants them.
//
// Decoding streams every weight from memory for every token. On pages of 4 KiB the TLB and the
// hardware prefetcher, which stops at a page's end, cost a third of the bandwidth. Many weights
// are smaller than a huge page, so they lie side by side in larger regions. A region is given back
// to the system with the last weight in it.

#pragma once

#include <cstddef>
#include <memory>

namespace aioserve::linear {

// Throws std::bad_alloc.
std::shared_ptr<char> allocate_weights(std::size_t num_bytes);

}  // namespace aioserve::linear

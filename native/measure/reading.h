// How fast this machine's threads read memory together: the limit of a decode step.

#pragma once

#include <cstddef>
#include <vector>

namespace aioserve::measure {

// Seconds of each of `passes` passes over `num_bytes` of memory, on the thread pool. Make it a few
// times the caches. The memory lies as packed weights do, on huge pages where there are any, and is
// written once before the first pass. Throws std::bad_alloc, and std::invalid_argument for less
// than 1 MiB or no pass.
std::vector<double> read_seconds(std::size_t num_bytes, int passes);

}  // namespace aioserve::measure

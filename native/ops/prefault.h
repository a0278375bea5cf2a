// Memory of KV pages before their first use.

#pragma once

#include "ops/kv_pages.h"

namespace aioserve::ops {

// Has the system provide the memory of pages [first, end), as writing to it would, but changes nothing
// that is there, whoever writes to it meanwhile. Throws std::invalid_argument for what lies outside
// `pages`.
void prefault(const KVPages& pages, int64_t first, int64_t end);

}  // namespace aioserve::ops

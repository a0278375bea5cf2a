#if defined(__x86_64__)

#include "ops/no_tiles.h"
#include "simd/avx2.h"
#include "simd/avx2_words.h"

namespace aioserve::ops {
namespace {

// Rows and vectors of attention's sums that fit the registers.
constexpr int kProductRows = 6;
constexpr int tile_columns(int64_t rows) { return rows <= 2 ? 4 : 2; }
constexpr bool kBfloat16Pairs = false;

}  // namespace
}  // namespace aioserve::ops

#include "ops/kernels.inl"

namespace aioserve::ops {
extern constexpr Table kAvx2 = kTable;
}

#endif

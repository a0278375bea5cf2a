// Attention over bfloat16 multiplies pairs, and rounds its weights to bfloat16 for it.

#if defined(__x86_64__)

#include "ops/no_tiles.h"
#include "simd/avx512_bf16.h"
#include "simd/avx512_words.h"

namespace aioserve::ops {
namespace {

// Rows and vectors of attention's sums that fit the registers.
constexpr int kProductRows = 6;
constexpr int tile_columns(int64_t rows) { return rows <= 2 ? 8 : 4; }
constexpr bool kBfloat16Pairs = true;

}  // namespace
}  // namespace aioserve::ops

#include "ops/kernels.inl"

namespace aioserve::ops {
extern constexpr Table kAvx512Bf16 = kTable;
}

#endif

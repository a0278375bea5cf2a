// As `kernels_avx512_bf16.cpp`, on a machine that has AVX-512 alone.

#if defined(__x86_64__)

#include "ops/no_tiles.h"
#include "simd/avx512_bf16_emulated.h"
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
extern constexpr Table kAvx512Bf16Emulated = kTable;
}

#endif

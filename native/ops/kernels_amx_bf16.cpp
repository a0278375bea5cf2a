#if defined(__x86_64__)

#include "simd/amx.h"
#include "simd/avx512_bf16.h"
#include "simd/avx512_words.h"

namespace aioserve::ops {
namespace {

// For what runs without tiles, float32 among it.
constexpr int kProductRows = 6;
constexpr int tile_columns(int64_t rows) { return rows <= 2 ? 8 : 4; }
constexpr bool kBfloat16Pairs = true;
constexpr bool kTiles = true;

}  // namespace
}  // namespace aioserve::ops

#include "ops/kernels.inl"

namespace aioserve::ops {
extern constexpr Table kAmxBf16 = kTable;
}

#endif

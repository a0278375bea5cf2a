// Only bfloat16: float32 is as on AVX-512.

#if defined(__x86_64__)

#include "simd/avx512_bf16.h"
//
#include "linear/pairs_tile.inl"

namespace aioserve::linear {
extern constexpr TileSet kAvx512Bf16Bfloat16 = tiles<Pairs, kPairsRows>();
}

#endif

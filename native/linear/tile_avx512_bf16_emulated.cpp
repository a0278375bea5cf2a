#if defined(__x86_64__)

#include "simd/avx512_bf16_emulated.h"
//
#include "linear/pairs_tile.inl"

namespace aioserve::linear {
extern constexpr TileSet kAvx512Bf16EmulatedBfloat16 = tiles<Pairs, kPairsRows>();
}

#endif

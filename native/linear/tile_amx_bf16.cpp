#if defined(__x86_64__)

#include "simd/amx.h"
#include "simd/avx512_bf16.h"
//
#include "linear/amx_tile.inl"

namespace aioserve::linear {
extern constexpr TileSet kAmxBf16Bfloat16 = amx_tiles();
}

#endif

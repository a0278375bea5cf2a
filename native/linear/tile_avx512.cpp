#if defined(__x86_64__)

#include "simd/avx512.h"
//
#include "linear/tile.inl"

namespace aioserve::linear {

extern constexpr TileSet kAvx512Float32 = tiles<Float32, 12>();
extern constexpr TileSet kAvx512Bfloat16 = tiles<Bfloat16, 10>();

}  // namespace aioserve::linear

#endif

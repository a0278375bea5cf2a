#if defined(__x86_64__)

#include "simd/avx2.h"
//
#include "linear/tile.inl"

namespace aioserve::linear {

// Three rows fill all 16 registers: 12 sums, 3 inputs, 1 weight. bfloat16 needs one for the mask.
extern constexpr TileSet kAvx2Float32 = tiles<Float32, 3>();
extern constexpr TileSet kAvx2Bfloat16 = tiles<Bfloat16, 2>();

}  // namespace aioserve::linear

#endif

#include "simd/portable.h"
//
#include "linear/tile.inl"

namespace aioserve::linear {

// A row's eight sums fill half of SSE's registers.
extern constexpr TileSet kPortableFloat32 = tiles<Float32, 1>();
extern constexpr TileSet kPortableBfloat16 = tiles<Bfloat16, 1>();

}  // namespace aioserve::linear

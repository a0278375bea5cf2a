#include "simd/portable.h"

namespace aioserve::linear {
namespace {

// For SSE's 16 registers.
constexpr int vectors_at_once(int, int rows) { return rows == 1 ? 8 : 2; }

}  // namespace
}  // namespace aioserve::linear

#include "linear/tile.inl"

namespace aioserve::linear {
extern constexpr TileSet kPortableFloat32 = tiles<Float32, 4>();
extern constexpr TileSet kPortableBfloat16 = tiles<Widened, 4, Halves>();
}  // namespace aioserve::linear

#if defined(__x86_64__)

#include "simd/avx2.h"

namespace aioserve::linear {
namespace {

// Two vectors of six rows fill all 16 registers: 12 sums, 2 weights, an input, and the mask for
// halves. Few rows take whole panels, for chains of sums enough to hide an addition's latency.
constexpr int vectors_at_once(int parts, int rows) { return rows <= (parts == 1 ? 3 : 2) ? 4 : 2; }

}  // namespace
}  // namespace aioserve::linear

#include "linear/tile.inl"

namespace aioserve::linear {
extern constexpr TileSet kAvx2Float32 = tiles<Float32, 6>();
extern constexpr TileSet kAvx2Bfloat16 = tiles<Widened, 6, Halves>();
}  // namespace aioserve::linear

#endif

#if defined(__x86_64__)

#include "simd/avx512.h"

namespace aioserve::linear {
namespace {

// A whole panel. Thirteen rows: 26 sums, 2 weights, a mask for halves, and room for inputs.
constexpr int vectors_at_once(int, int) { return 2; }

}  // namespace
}  // namespace aioserve::linear

#include "linear/tile.inl"

namespace aioserve::linear {
extern constexpr TileSet kAvx512Float32 = tiles<Float32, 13>();
extern constexpr TileSet kAvx512Bfloat16 = tiles<Widened, 13, Halves>();
}  // namespace aioserve::linear

#endif

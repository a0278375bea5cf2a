#if defined(__x86_64__)

#include "simd/avx512_vnni.h"
//
#include "linear/grouped/dot.inl"

namespace aioserve::linear::grouped {
namespace {

// A whole panel. Six rows: 12 sums, 12 outputs, 2 weights, a mask for halves, and room for inputs.
// Seven or eight keep some outputs in memory, which costs less than a second pass over the panel.
constexpr int vectors_at_once(int) { return 2; }

}  // namespace
}  // namespace aioserve::linear::grouped

#include "linear/grouped/tile.inl"

namespace aioserve::linear::grouped {
extern constexpr IntegerTiles kAvx512Vnni = {{tiles<Dot, k8Bits, 6, 8>(),
    tiles<Dot, k6Bits, 6, 8>(),
    tiles<Dot, k5Bits, 6, 8>(),
    tiles<Dot, k4Bits, 6, 8>(),
    tiles<Dot, kTable, 6, 8>()}};
}  // namespace aioserve::linear::grouped

#endif

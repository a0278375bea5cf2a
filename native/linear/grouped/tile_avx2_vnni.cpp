#if defined(__x86_64__)

#include "simd/avx2_vnni.h"
//
#include "linear/grouped/dot.inl"

namespace aioserve::linear::grouped {
namespace {

constexpr int vectors_at_once(int rows) { return rows == 1 ? 4 : 2; }

}  // namespace
}  // namespace aioserve::linear::grouped

#include "linear/grouped/tile.inl"

namespace aioserve::linear::grouped {
extern constexpr IntegerTiles kAvx2Vnni = {{tiles<Dot, k8Bits, 6>(),
    tiles<Dot, k6Bits, 6>(),
    tiles<Dot, k5Bits, 6>(),
    tiles<Dot, k4Bits, 6>(),
    tiles<Dot, kTable, 6>()}};
}  // namespace aioserve::linear::grouped

#endif

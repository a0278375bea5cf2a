#if defined(__x86_64__)

#include "simd/avx2_ints.h"
//
#include "linear/grouped/few_bits.inl"
#include "linear/grouped/pairs.inl"

namespace aioserve::linear::grouped {
namespace {

constexpr int vectors_at_once(int rows) { return rows == 1 ? 4 : 2; }

}  // namespace
}  // namespace aioserve::linear::grouped

#include "linear/grouped/tile.inl"

namespace aioserve::linear::grouped {
extern constexpr IntegerTiles kAvx2 = {{tiles<Pairs, k8Bits, 5>(), tiles<Pairs, k6Bits, 5>(),
    tiles<FewBits, k5Bits, 6>(), tiles<FewBits, k4Bits, 6>(),
    tiles<Pairs, kTable, 5>()}};
}  // namespace aioserve::linear::grouped

#endif

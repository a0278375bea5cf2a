#if defined(__x86_64__)

#include "simd/avx512_ints.h"
//
#include "linear/grouped/few_bits.inl"
#include "linear/grouped/pairs.inl"

namespace aioserve::linear::grouped {
namespace {

constexpr int vectors_at_once(int) { return 2; }

}  // namespace
}  // namespace aioserve::linear::grouped

#include "linear/grouped/tile.inl"

namespace aioserve::linear::grouped {
extern constexpr IntegerTiles kAvx512 = {{tiles<Pairs, k8Bits, 6>(), tiles<Pairs, k6Bits, 6>(),
    tiles<FewBits, k5Bits, 6>(), tiles<FewBits, k4Bits, 6>(),
    tiles<Pairs, kTable, 6>()}};
}  // namespace aioserve::linear::grouped

#endif

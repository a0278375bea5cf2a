#include "simd/portable_ints.h"
//
#include "linear/grouped/pairs.inl"

namespace aioserve::linear::grouped {
namespace {

// For SSE's 16 registers.
constexpr int vectors_at_once(int rows) { return rows == 1 ? 4 : 2; }

}  // namespace
}  // namespace aioserve::linear::grouped

#include "linear/grouped/tile.inl"

namespace aioserve::linear::grouped {
extern constexpr IntegerTiles kPortable = {{tiles<Pairs, k8Bits, 3>(),
    tiles<Pairs, k6Bits, 3>(),
    tiles<Pairs, k5Bits, 3>(),
    tiles<Pairs, k4Bits, 3>(),
    tiles<Pairs, kTable, 3>()}};
}  // namespace aioserve::linear::grouped

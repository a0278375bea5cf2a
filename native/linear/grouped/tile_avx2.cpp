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
namespace {

constexpr int kUnpackedRows = 32;

template <Storage S>
constexpr TileSet kPairs = tiles<Pairs, S, 5>();
template <Storage S>
constexpr TileSet kFewBits = tiles<FewBits, S, 6>();
template <Storage S>
constexpr StorageTiles kUnpacked = unpacked_from<S>(kUnpackedRows, kPairs<S>, kPairs<k8Bits>);
constexpr StorageTiles k5BitsTiles =
    unpacked_from<k5Bits>(kUnpackedRows, kFewBits<k5Bits>, kFewBits<k8Bits>);

}  // namespace

extern constexpr IntegerTiles kAvx2 = {{never_unpacked(kPairs<k8Bits>), kUnpacked<k6Bits>,
                                        k5BitsTiles, never_unpacked(kFewBits<k4Bits>),
                                        kUnpacked<kTable>}};
}  // namespace aioserve::linear::grouped

#endif

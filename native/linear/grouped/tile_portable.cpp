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
namespace {

constexpr int kUnpackedRows = 16;

template <Storage S>
constexpr TileSet kTiles = tiles<Pairs, S, 3>();
template <Storage S>
constexpr StorageTiles kUnpacked = unpacked_from<S>(kUnpackedRows, kTiles<S>, kTiles<k8Bits>);

}  // namespace

extern constexpr IntegerTiles kPortable = {{never_unpacked(kTiles<k8Bits>), kUnpacked<k6Bits>,
                                            kUnpacked<k5Bits>, never_unpacked(kTiles<k4Bits>),
                                            kUnpacked<kTable>}};
}  // namespace aioserve::linear::grouped

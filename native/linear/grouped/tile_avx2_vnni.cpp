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
namespace {

constexpr int kUnpackedRows = 32;

template <Storage S>
constexpr TileSet kTiles = tiles<Dot, S, 6>();
template <Storage S>
constexpr StorageTiles kUnpacked = unpacked_from<S>(kUnpackedRows, kTiles<S>, kTiles<k8Bits>);

}  // namespace

extern constexpr IntegerTiles kAvx2Vnni = {{never_unpacked(kTiles<k8Bits>), kUnpacked<k6Bits>,
                                            kUnpacked<k5Bits>, never_unpacked(kTiles<k4Bits>),
                                            kUnpacked<kTable>}};
}  // namespace aioserve::linear::grouped

#endif

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
namespace {

// Of 5 and 6 bits. The products hide what 4 bits take.
constexpr int kUnpackedRows = 64;

template <Storage S>
constexpr TileSet kTiles = tiles<Dot, S, 6, 8>();
template <Storage S>
constexpr StorageTiles kUnpacked = unpacked_from<S>(kUnpackedRows, kTiles<S>, kTiles<k8Bits>);

}  // namespace

extern constexpr IntegerTiles kAvx512Vnni = {{never_unpacked(kTiles<k8Bits>), kUnpacked<k6Bits>,
                                              kUnpacked<k5Bits>, never_unpacked(kTiles<k4Bits>),
                                              never_unpacked(kTiles<kTable>)}};
}  // namespace aioserve::linear::grouped

#endif

#include "simd/amx_emulated.h"
#include "simd/vnni_emulated.h"
//
#include "linear/grouped/amx_tile.inl"

namespace aioserve::linear::grouped {
extern constexpr IntegerTiles kAmxInt8Emulated = {{never_unpacked(kTiles<k8Bits>), kUnpacked<k6Bits>,
                                                   kUnpacked<k5Bits>, kUnpacked<k4Bits>,
                                                   kUnpacked<kTable>}};
}  // namespace aioserve::linear::grouped

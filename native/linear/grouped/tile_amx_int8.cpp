#if defined(__x86_64__)

#include "simd/amx.h"
#include "simd/avx512_vnni.h"
//
#include "linear/grouped/amx_tile.inl"

namespace aioserve::linear::grouped {
extern constexpr IntegerTiles kAmxInt8 = {{never_unpacked(kTiles<k8Bits>), kUnpacked<k6Bits>,
                                           kUnpacked<k5Bits>, kUnpacked<k4Bits>,
                                           kUnpacked<kTable>}};
}  // namespace aioserve::linear::grouped

#endif

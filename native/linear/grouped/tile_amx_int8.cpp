#if defined(__x86_64__)

#include "simd/amx.h"
#include "simd/avx512_vnni.h"
//
#include "linear/grouped/amx_tile.inl"

namespace aioserve::linear::grouped {
extern constexpr IntegerTiles kAmxInt8 = {{amx_tiles<k8Bits>(), amx_tiles<k6Bits>(),
    amx_tiles<k5Bits>(), amx_tiles<k4Bits>(),
    amx_tiles<kTable>()}};
}  // namespace aioserve::linear::grouped

#endif

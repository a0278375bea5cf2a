#include "simd/amx_emulated.h"
#include "simd/vnni_emulated.h"
//
#include "linear/grouped/amx_tile.inl"

namespace aioserve::linear::grouped {
extern constexpr IntegerTiles kAmxInt8Emulated = {{amx_tiles<k8Bits>(), amx_tiles<k6Bits>(),
    amx_tiles<k5Bits>(), amx_tiles<k4Bits>(),
    amx_tiles<kTable>()}};
}  // namespace aioserve::linear::grouped

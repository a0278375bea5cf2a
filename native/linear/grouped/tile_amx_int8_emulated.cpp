#include "simd/amx_emulated.h"
#include "simd/vnni_emulated.h"
//
#include "linear/grouped/amx_tile.inl"

namespace aioserve::linear::grouped {
extern constexpr IntegerTiles kAmxInt8Emulated = {amx_tiles<8>(), amx_tiles<4>()};
}  // namespace aioserve::linear::grouped

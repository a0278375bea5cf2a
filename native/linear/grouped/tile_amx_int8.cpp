#if defined(__x86_64__)

#include "simd/amx.h"
#include "simd/avx512_vnni.h"
//
#include "linear/grouped/amx_tile.inl"

namespace aioserve::linear::grouped {
extern constexpr IntegerTiles kAmxInt8 = {amx_tiles<8>(), amx_tiles<4>()};
}  // namespace aioserve::linear::grouped

#endif

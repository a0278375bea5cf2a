#include "simd/amx_emulated.h"
//
#include "linear/amx_tile.inl"

namespace aioserve::linear {
extern constexpr TileSet kAmxBf16EmulatedBfloat16 = amx_tiles();
}

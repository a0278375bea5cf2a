// No tiles for few rows: products of the portable tiles are as the compiler rounds them, and have to be
// those of the very same tiles.

#include "simd/portable_codes.h"
//
#include "linear/decoded/decode.inl"

namespace aioserve::linear::decoded {
namespace {

using Steps = Pairs16<rounded_pairs>;

}  // namespace

extern constexpr Decoding kPortableFloat32 = {unpack<Singles>, unpack<Singles>, nullptr};
extern constexpr Decoding kPortableBfloat16 = {unpack<Steps>, unpack<Steps>, nullptr};

}  // namespace aioserve::linear::decoded

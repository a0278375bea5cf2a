#if defined(__x86_64__)

#include "simd/avx512_codes.h"
//
#include "linear/decoded/decode.inl"

namespace aioserve::linear {
namespace {

// As `linear/tile_avx512.cpp`.
constexpr int vectors_at_once(int, int) { return 2; }

}  // namespace
}  // namespace aioserve::linear

#include "linear/tile.inl"
//
#include "linear/decoded/tile.inl"

namespace aioserve::linear::decoded {
namespace {

using Steps = Pairs16<rounded_pairs>;
constexpr TileSet kFloat32Rows = few_rows<Float32, Singles, 13>();
constexpr TileSet kBfloat16Rows = few_rows<Widened, Steps, 13, Halves>();

}  // namespace

extern constexpr Decoding kAvx512Float32 = {unpack<Singles>, unpack<Singles>, &kFloat32Rows};
extern constexpr Decoding kAvx512Bfloat16 = {unpack<Steps>, unpack<Steps>, &kBfloat16Rows};
// For tiles that multiply pairs.
extern constexpr Decoding kAvx512Unpacked = {unpack<Steps>, unpack<Steps>, nullptr};

}  // namespace aioserve::linear::decoded

#endif

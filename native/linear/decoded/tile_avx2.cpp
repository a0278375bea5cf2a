#if defined(__x86_64__)

#include "simd/avx2_codes.h"
//
#include "linear/decoded/decode.inl"

namespace aioserve::linear {
namespace {

// As `linear/tile_avx2.cpp`.
constexpr int vectors_at_once(int parts, int rows) { return rows <= (parts == 1 ? 3 : 2) ? 4 : 2; }

}  // namespace
}  // namespace aioserve::linear

#include "linear/tile.inl"
//
#include "linear/decoded/tile.inl"

namespace aioserve::linear::decoded {
namespace {

using Steps = Pairs16<rounded_pairs>;
constexpr TileSet kFloat32Rows = few_rows<Float32, Singles, 6>();
constexpr TileSet kBfloat16Rows = few_rows<Widened, Steps, 6, Halves>();

}  // namespace

extern constexpr Decoding kAvx2Float32 = {unpack<Singles>, unpack<Singles>, &kFloat32Rows};
extern constexpr Decoding kAvx2Bfloat16 = {unpack<Steps>, unpack<Steps>, &kBfloat16Rows};

}  // namespace aioserve::linear::decoded

#endif

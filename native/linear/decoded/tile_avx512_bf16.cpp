// Float32 is as on AVX-512. The instruction that rounds pairs takes what is below the normal numbers as
// zeros, as that which multiplies them does; but what would be rounded up to the least normal number,
// too.

#if defined(__x86_64__)

#include "simd/avx512_codes.h"
//
#include "simd/avx512_bf16.h"
//
#include "linear/decoded/decode.inl"
//
#include "linear/pairs_tile.inl"
//
#include "linear/decoded/tile.inl"

namespace aioserve::linear::decoded {
namespace {

inline Vec interleaved_pairs(Vec first, Vec second) {
    alignas(64) static constexpr uint16_t kTurns[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i halves = round_to_bf16(first, second);
    return {_mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(kTurns), halves))};
}

using Steps = Pairs16<interleaved_pairs>;
using SmallSteps = Pairs16<rounded_pairs>;
constexpr TileSet kBfloat16Rows = few_rows<Pairs, Steps, kPairsRows>();

}  // namespace

extern constexpr Decoding kAvx512Bf16Bfloat16 = {unpack<Steps>, unpack<SmallSteps>,
                                                 &kBfloat16Rows};
// For AMX's tiles.
extern constexpr Decoding kAvx512Bf16Unpacked = {unpack<Steps>, unpack<SmallSteps>, nullptr};

}  // namespace aioserve::linear::decoded

#endif

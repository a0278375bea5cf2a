// Tiles for AVX-512 with the bfloat16 dot product, which takes a step's pair at once. float32 is as
// in AVX-512.

#include "linear/tile.h"

#if defined(__AVX512BF16__)

#include <immintrin.h>

namespace aioserve::linear {
namespace {

struct Bfloat16 {
    static constexpr int lanes = 16;
    static constexpr int parts = 1;
    using Sum = __m512;
    using Weights = __m512i;
    using Input = __m512i;

    static Sum zero() { return _mm512_setzero_ps(); }
    template <int>
    static Weights weights(const char* p) {
        return _mm512_loadu_si512(p);
    }
    template <int>
    static Input input(const char* p) {
        int pair;
        std::memcpy(&pair, p, 4);
        return _mm512_set1_epi32(pair);
    }
    static Sum multiply_add(Sum sum, Input x, Weights w) {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
    }
    static Sum add_bias(Sum sum, const float* bias) {
        return _mm512_add_ps(sum, _mm512_loadu_ps(bias));
    }
    static __mmask16 mask(int columns) {
        return columns >= lanes ? 0xffff : static_cast<__mmask16>((1u << columns) - 1);
    }
    static void store_float32(float* y, Sum sum, int columns) {
        _mm512_mask_storeu_ps(y, mask(columns), sum);
    }
    static void store_bfloat16(std::uint16_t* y, Sum sum, int columns) {
        _mm256_mask_storeu_epi16(y, mask(columns), (__m256i)_mm512_cvtneps_pbh(sum));
    }
};

constexpr TileSet kBfloat16 = tiles<Bfloat16, 12>();

}  // namespace

const TileSet* avx512_bf16_tiles() { return &kBfloat16; }

}  // namespace aioserve::linear

#else

namespace aioserve::linear {
const TileSet* avx512_bf16_tiles() { return nullptr; }
}  // namespace aioserve::linear

#endif

// Tiles for AVX-512 without the bfloat16 dot product.

#include "linear/tile.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

// GCC 12's own header reads an uninitialised variable on purpose (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

namespace aioserve::linear {
namespace {

struct Common {
    static constexpr int lanes = 16;
    using Sum = __m512;
    using Weights = __m512;
    using Input = __m512;

    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum multiply_add(Sum sum, Input x, Weights w) { return _mm512_fmadd_ps(x, w, sum); }
    static Sum add_bias(Sum sum, const float* bias) {
        return _mm512_add_ps(sum, _mm512_loadu_ps(bias));
    }
    static __mmask16 mask(int columns) {
        return columns >= lanes ? 0xffff : static_cast<__mmask16>((1u << columns) - 1);
    }
    static void store_float32(float* y, Sum sum, int columns) {
        _mm512_mask_storeu_ps(y, mask(columns), sum);
    }
    // Rounds to nearest even; a NaN stays one.
    static void store_bfloat16(std::uint16_t* y, Sum sum, int columns) {
        const __m512i bits = _mm512_castps_si512(sum);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
        const __m512i rounded = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
        _mm512_mask_cvtepi32_storeu_epi16(y, mask(columns), _mm512_srli_epi32(rounded, 16));
    }
};

struct Float32 : Common {
    static constexpr int parts = 1;
    template <int>
    static Weights weights(const char* p) {
        return _mm512_loadu_ps(p);
    }
    template <int>
    static Input input(const char* p) {
        float value;
        std::memcpy(&value, p, 4);
        return _mm512_set1_ps(value);
    }
};

struct Bfloat16 : Common {
    static constexpr int parts = 2;  // the first of each pair, then the second
    template <int PART>
    static __m512 half(__m512i pairs) {
        return _mm512_castsi512_ps(PART == 0
                                       ? _mm512_slli_epi32(pairs, 16)
                                       : _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
    }
    template <int PART>
    static Weights weights(const char* p) {
        return half<PART>(_mm512_loadu_si512(p));
    }
    template <int PART>
    static Input input(const char* p) {
        int pair;
        std::memcpy(&pair, p, 4);
        return half<PART>(_mm512_set1_epi32(pair));
    }
};

constexpr TileSet kFloat32 = tiles<Float32, 12>();
constexpr TileSet kBfloat16 = tiles<Bfloat16, 10>();

}  // namespace

const TileSet* avx512_tiles(bool bfloat16) { return bfloat16 ? &kBfloat16 : &kFloat32; }

}  // namespace aioserve::linear

#else

namespace aioserve::linear {
const TileSet* avx512_tiles(bool) { return nullptr; }
}  // namespace aioserve::linear

#endif

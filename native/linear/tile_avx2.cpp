// Tiles for AVX2 with FMA.

#include "linear/tile.h"

#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

namespace aioserve::linear {
namespace {

struct Common {
    static constexpr int lanes = 8;
    using Sum = __m256;
    using Weights = __m256;
    using Input = __m256;

    static Sum zero() { return _mm256_setzero_ps(); }
    static Sum multiply_add(Sum sum, Input x, Weights w) { return _mm256_fmadd_ps(x, w, sum); }
    static Sum add_bias(Sum sum, const float* bias) {
        return _mm256_add_ps(sum, _mm256_loadu_ps(bias));
    }
    static void store_float32(float* y, Sum sum, int columns) {
        if (columns >= lanes) return _mm256_storeu_ps(y, sum);
        float values[lanes];
        _mm256_storeu_ps(values, sum);
        std::memcpy(y, values, sizeof(float) * static_cast<std::size_t>(columns));
    }
    static void store_bfloat16(std::uint16_t* y, Sum sum, int columns) {
        float values[lanes];
        _mm256_storeu_ps(values, sum);
        for (int i = 0; i < (columns < lanes ? columns : lanes); ++i) y[i] = bfloat16_of(values[i]);
    }
};

struct Float32 : Common {
    static constexpr int parts = 1;
    template <int>
    static Weights weights(const char* p) {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    }
    template <int>
    static Input input(const char* p) {
        float value;
        std::memcpy(&value, p, 4);
        return _mm256_set1_ps(value);
    }
};

struct Bfloat16 : Common {
    static constexpr int parts = 2;  // the first of each pair, then the second
    template <int PART>
    static __m256 half(__m256i pairs) {
        return _mm256_castsi256_ps(PART == 0
                                       ? _mm256_slli_epi32(pairs, 16)
                                       : _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
    }
    template <int PART>
    static Weights weights(const char* p) {
        return half<PART>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    template <int PART>
    static Input input(const char* p) {
        int pair;
        std::memcpy(&pair, p, 4);
        return half<PART>(_mm256_set1_epi32(pair));
    }
};

// Three rows fill all 16 registers: 12 sums, 3 inputs, 1 weight. bfloat16 needs one for the mask.
constexpr TileSet kFloat32 = tiles<Float32, 3>();
constexpr TileSet kBfloat16 = tiles<Bfloat16, 2>();

}  // namespace

const TileSet* avx2_tiles(bool bfloat16) { return bfloat16 ? &kBfloat16 : &kFloat32; }

}  // namespace aioserve::linear

#else

namespace aioserve::linear {
const TileSet* avx2_tiles(bool) { return nullptr; }
}  // namespace aioserve::linear

#endif

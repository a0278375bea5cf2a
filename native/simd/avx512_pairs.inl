// What kernels need around products of pairs, over `round_to_bf16` in scope.

namespace aioserve {
namespace {

// Up to 32 values, zeros past `left`.
inline Vec load_pairs(const bf16* p, int64_t left) {
    if (left >= 32) return {_mm512_castsi512_ps(_mm512_loadu_si512(p))};
    const __mmask32 some = static_cast<__mmask32>((1u << left) - 1);
    return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(some, p))};
}

// out[i] = (even[i], odd[i]), padded with zeros to whole vectors.
inline void interleave(const bf16* even, const bf16* odd, int64_t size, float* out) {
    alignas(64) static constexpr uint16_t kLow[32] = {
        0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t i = 0; i < size; i += 32) {
        const __m512i a = _mm512_castps_si512(load_pairs(even + i, size - i).v);
        const __m512i b = _mm512_castps_si512(load_pairs(odd + i, size - i).v);
        _mm512_storeu_si512(out + i, _mm512_permutex2var_epi16(a, low, b));
        if (size - i > 16) _mm512_storeu_si512(out + i + 16, _mm512_permutex2var_epi16(a, high, b));
    }
}

// Stores the first `count` lanes, or all, as bfloat16; denormal numbers as zeros.
inline void store_rounded(Vec x, bf16* to, int64_t count) {
    const __mmask16 first = count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
    _mm256_mask_storeu_epi16(to, first, round_to_bf16(x));
}

// 2^x to 13 bits, and exactly 1 at 0, for x of at most about 0; what is too small may be a denormal number.
// The polynomial is a minimax fit on [0, 1].
inline Vec rough_exp2(Vec x) {
    const Vec r = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
    Vec p = Vec::fma(Vec::set(7.706716940e-02f), r, Vec::set(2.276448523e-01f));
    p = Vec::fma(p, r, Vec::set(6.951168168e-01f));
    p = Vec::fma(p, r, Vec::set(1.0f));
    return {_mm512_scalef_ps(p.v, x.v)};  // times 2^floor(x)
}

// Stores 2^first and then 2^second as bfloat16, zeros for those too small for a normal number, and returns
// `sum` plus what was stored, two of them in each lane.
inline Vec store_powers(Vec first, Vec second, bf16* to, Vec sum) {
    const __m512i powers = round_to_bf16(rough_exp2(first), rough_exp2(second));
    _mm512_storeu_si512(to, powers);
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    return dot_bf16({_mm512_castsi512_ps(powers)}, {_mm512_castsi512_ps(ones)}, sum);
}

}  // namespace
}  // namespace aioserve

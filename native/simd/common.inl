// What is the same on every instruction set, over the `Vec` in scope: the ends of rows, and elementary
// functions, whose polynomials are minimax fits on the reduced range.

#pragma once

#include "simd/bf16.h"

namespace aioserve {
namespace {

// As much as fits of the `left` elements from p on, at least one; zeros in the lanes past them.
template <class T>
inline Vec load_some(const T* p, int64_t left) {
    return left >= Vec::kWidth ? Vec::load(p) : Vec::load(p, static_cast<int>(left));
}

template <class T>
inline void store_some(Vec x, T* p, int64_t left) {
    if (left >= Vec::kWidth) {
        x.store(p);
    } else {
        x.store(p, static_cast<int>(left));
    }
}

// The largest lane of each of the first `count` vectors, in order; the vectors are lost.
inline Vec largest_of_each(Vec (&x)[Vec::kWidth], int64_t count) {
    Vec top = Vec::set(x[0].largest());
    if (count <= Vec::kWidth / 4) {
        for (int i = 1; i < count; ++i) top = Vec::keep(top, 0, i, Vec::set(x[i].largest()));
        return top;
    }
    for (int64_t i = count; i < Vec::kWidth; ++i) x[i] = x[0];
    Vec::transpose(x);
    top = x[0];
    for (int i = 1; i < Vec::kWidth; ++i) top = Vec::max(top, x[i]);
    return top;
}

// 2^(n + r) for integral n and |r| <= 0.5, where n + r <= 126; 0 where n < -125.
inline Vec exp2_split(Vec n, Vec r) {
    Vec p = Vec::fma(Vec::set(1.547589670e-04f), r, Vec::set(1.340028316e-03f));
    p = Vec::fma(p, r, Vec::set(9.618005415e-03f));
    p = Vec::fma(p, r, Vec::set(5.550327742e-02f));
    p = Vec::fma(p, r, Vec::set(2.402265133e-01f));
    p = Vec::fma(p, r, Vec::set(6.931472063e-01f));
    p = Vec::fma(p, r, Vec::set(1.0f));
    return Vec::zero_below(Vec::scale(p, n), n, Vec::set(-125.0f));
}

// 2^x for x <= 126, and exactly 1 at 0.
inline Vec exp2(Vec x) {
    const Vec n = Vec::round(x);
    return exp2_split(n, x - n);
}

// tanh(x) = e / (e + 2) with e = exp(2 |x|) - 1, which keeps small x exact to rounding.
inline Vec tanh(Vec x) {
    // Past 10 the result rounds to 1. The order of arguments lets NaN through.
    const Vec ceiling = Vec::set(-20.0f);
    const Vec y = Vec::zero() - Vec::max(ceiling, Vec::set(-2.0f) * Vec::abs(x));
    const Vec n = Vec::round(y * Vec::set(1.442695041f));
    Vec r = Vec::fma(n, Vec::set(-0.693115234375f), y);
    r = Vec::fma(n, Vec::set(-3.194618494528623e-05f), r);
    Vec p = Vec::fma(Vec::set(1.991356920e-04f), r, Vec::set(1.394101973e-03f));
    p = Vec::fma(p, r, Vec::set(8.333274141e-03f));
    p = Vec::fma(p, r, Vec::set(4.166635445e-02f));
    p = Vec::fma(p, r, Vec::set(1.666666681e-01f));
    p = Vec::fma(p, r, Vec::set(5.000000047e-01f));
    p = Vec::fma(p * r, r, r);
    const Vec power = Vec::scale(Vec::set(1.0f), n);
    const Vec e = Vec::fma(power, p, power - Vec::set(1.0f));
    return Vec::copy_sign(e / (e + Vec::set(2.0f)), x);
}

// exp(-x). Below -87 it leaves float32, and stays what it is there.
inline Vec exp_minus(Vec x) {
    const Vec y = Vec::max(Vec::set(-87.0f), x);
    const Vec log2e = Vec::set(-1.442695041f);
    const Vec n = Vec::round(y * log2e);
    const Vec r = Vec::fma(y, Vec::set(-1.92596299e-8f), Vec::fma(y, log2e, Vec::zero() - n));
    return exp2_split(n, r);
}

// The divisor of a sigmoid gate: a quotient is nothing below -87 either way.
inline Vec one_plus_exp_minus(Vec x) { return Vec::set(1.0f) + exp_minus(x); }

// erfc(x) for x >= 0, within about 1e-6 of itself: t exp(-x^2 + p(t)) with t = 1 / (1 + x / 2), after
// Press et al., "Numerical Recipes in C", 1992, section 6.2.
inline Vec erfc_positive(Vec x) {
    const Vec one = Vec::set(1.0f);
    const Vec t = one / Vec::fma(Vec::set(0.5f), x, one);
    Vec p = Vec::fma(Vec::set(0.17087277f), t, Vec::set(-0.82215223f));
    p = Vec::fma(p, t, Vec::set(1.48851587f));
    p = Vec::fma(p, t, Vec::set(-1.13520398f));
    p = Vec::fma(p, t, Vec::set(0.27886807f));
    p = Vec::fma(p, t, Vec::set(-0.18628806f));
    p = Vec::fma(p, t, Vec::set(0.09678418f));
    p = Vec::fma(p, t, Vec::set(0.37409196f));
    p = Vec::fma(p, t, Vec::set(1.00002368f));
    p = Vec::fma(p, t, Vec::set(-1.26551223f));
    return t * exp_minus(Vec::fma(x, x, Vec::zero() - p));
}

}  // namespace
}  // namespace aioserve

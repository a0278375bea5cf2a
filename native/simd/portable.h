// Four floats in the vectors of GCC and Clang, for any architecture.

#pragma once

#include "simd/bf16.h"

namespace aioserve {
namespace {

struct Vec {
    using Floats = float __attribute__((vector_size(16)));
    using Ints = int32_t __attribute__((vector_size(16)));
    using Words = uint32_t __attribute__((vector_size(16)));
    using Halves = uint16_t __attribute__((vector_size(8)));

    Floats v;
    static constexpr int kWidth = 4;

    static Vec zero() { return {Floats{}}; }
    static Vec set(float x) { return {Floats{x, x, x, x}}; }
    static Vec set_bits(const void* p) {
        float x;
        __builtin_memcpy(&x, p, 4);
        return set(x);
    }
    static Vec load(const float* p) {
        Vec r;
        __builtin_memcpy(&r.v, p, sizeof(r.v));
        return r;
    }
    static Vec load(const bf16* p) {
        Halves halves;
        __builtin_memcpy(&halves, p, sizeof(halves));
        return of(__builtin_convertvector(halves, Words) << 16);
    }
    template <class T>
    static Vec load(const T* p, int n) {
        T padded[4] = {};
        __builtin_memcpy(padded, p, n * sizeof(T));
        return load(padded);
    }
    void store(float* p) const { __builtin_memcpy(p, &v, sizeof(v)); }
    void store(bf16* p) const {
        const Halves halves = narrow();
        __builtin_memcpy(p, &halves, sizeof(halves));
    }
    template <class T>
    void store(T* p, int n) const {
        T padded[4];
        store(padded);
        __builtin_memcpy(p, padded, n * sizeof(T));
    }

    // Of lanes that hold two bfloat16 each: the first of every pair, and the second, as floats.
    Vec first_halves() const { return of(bits() << 16); }
    Vec second_halves() const { return of(bits() & 0xffff0000u); }

    static Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
    friend Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
    friend Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
    friend Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
    friend Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
    static Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
    // Adding 1.5 * 2^23 leaves no room for a fraction; exact for |a| < 2^22.
    static Vec round(Vec a) {
        const Vec magic = set(12582912.0f);
        return (a + magic) - magic;
    }
    // a * 2^n for integral n, with a in [0.5, 2) and n from -125 to 126.
    static Vec scale(Vec a, Vec n) {
        // Out of range (the caller then drops the lane) or NaN must not reach the conversion.
        const Floats least = set(-126.0f).v, most = set(127.0f).v;
        const Floats inside = n.v > least ? (n.v < most ? n.v : most) : least;
        const Ints exponent = __builtin_convertvector(inside, Ints) + 127;
        return {a.v * of((Words)exponent << 23).v};
    }
    static Vec abs(Vec a) { return of(a.bits() & ~kSign); }
    static Vec copy_sign(Vec magnitude, Vec sign) {
        return of((sign.bits() & kSign) | (magnitude.bits() & ~kSign));
    }
    // Zero where x < limit; NaN stays.
    static Vec zero_below(Vec a, Vec x, Vec limit) { return {x.v < limit.v ? zero().v : a.v}; }
    // The lanes [begin, end) of a, `fill` elsewhere.
    static Vec keep(Vec a, int begin, int end, Vec fill) {
        const Ints lane = {0, 1, 2, 3};
        return {(lane >= begin) & (lane < end) ? a.v : fill.v};
    }
    float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
    float largest() const {
        const float a = v[0] > v[1] ? v[0] : v[1];
        const float b = v[2] > v[3] ? v[2] : v[3];
        return a > b ? a : b;
    }
    float front() const { return v[0]; }

    static void transpose(Vec (&rows)[4]) {
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < i; ++j) {
                const float kept = rows[i].v[j];
                rows[i].v[j] = rows[j].v[i];
                rows[j].v[i] = kept;
            }
        }
    }

private:
    static constexpr uint32_t kSign = 0x80000000u;

    static Vec of(Words bits) { return {(Floats)bits}; }
    Words bits() const { return (Words)v; }
    // Round to nearest even; a NaN stays one.
    Halves narrow() const {
        const Words rounded = bits() + 0x7fff + ((bits() >> 16) & 1);
        const Words kept = v == v ? rounded : Words{} + 0x7fc00000u;
        return __builtin_convertvector(kept >> 16, Halves);
    }
};

}  // namespace
}  // namespace aioserve

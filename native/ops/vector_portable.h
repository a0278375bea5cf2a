// Four floats in plain C++, for any compiler and architecture; compilers turn most of it into
// whatever vectors they have. Included by a kernel file only, within its own namespace.

struct Vec {
    float v[4];
    static constexpr int kWidth = 4;

    template <class Fn>
    static Vec each(Fn fn) {
        Vec r;
        for (int i = 0; i < 4; ++i) r.v[i] = fn(i);
        return r;
    }
    static Vec zero() { return {}; }
    static Vec set(float x) { return {{x, x, x, x}}; }
    static Vec set_bits(const void* p) {
        float x;
        __builtin_memcpy(&x, p, 4);
        return set(x);
    }
    static Vec load(const float* p) {
        Vec r;
        __builtin_memcpy(r.v, p, sizeof(r.v));
        return r;
    }
    static Vec load(const bf16* p) {
        return each([&](int i) { return widen(p[i]); });
    }
    template <class T>
    static Vec load(const T* p, int n) {
        T padded[4] = {};
        __builtin_memcpy(padded, p, n * sizeof(T));
        return load(padded);
    }
    void store(float* p) const { __builtin_memcpy(p, v, sizeof(v)); }
    void store(bf16* p) const {
        for (int i = 0; i < 4; ++i) p[i] = narrow(v[i]);
    }
    template <class T>
    void store(T* p, int n) const {
        T padded[4];
        store(padded);
        __builtin_memcpy(p, padded, n * sizeof(T));
    }

    static Vec fma(Vec a, Vec b, Vec c) {
        return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
    }
    friend Vec operator+(Vec a, Vec b) {
        return each([&](int i) { return a.v[i] + b.v[i]; });
    }
    friend Vec operator-(Vec a, Vec b) {
        return each([&](int i) { return a.v[i] - b.v[i]; });
    }
    friend Vec operator*(Vec a, Vec b) {
        return each([&](int i) { return a.v[i] * b.v[i]; });
    }
    friend Vec operator/(Vec a, Vec b) {
        return each([&](int i) { return a.v[i] / b.v[i]; });
    }
    static Vec max(Vec a, Vec b) {
        return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
    }
    // Adding 1.5 * 2^23 leaves no room for a fraction; exact for |a| < 2^22.
    static Vec round(Vec a) {
        const Vec magic = set(12582912.0f);
        return (a + magic) - magic;
    }
    // a * 2^n for integral n, with a in [0.5, 2) and n from -125 to 126.
    static Vec scale(Vec a, Vec n) {
        return each([&](int i) {
            // Out of range (the caller then drops the lane) or NaN must not reach the conversion.
            const float inside = n.v[i] > -126.0f ? (n.v[i] < 127.0f ? n.v[i] : 127.0f) : -126.0f;
            const int32_t bits = (static_cast<int32_t>(inside) + 127) << 23;
            float power;
            __builtin_memcpy(&power, &bits, 4);
            return a.v[i] * power;
        });
    }
    static Vec abs(Vec a) {
        return each([&](int i) { return __builtin_fabsf(a.v[i]); });
    }
    static Vec copy_sign(Vec magnitude, Vec sign) {
        return each([&](int i) { return __builtin_copysignf(magnitude.v[i], sign.v[i]); });
    }
    // Zero where x < limit; NaN stays.
    static Vec zero_below(Vec a, Vec x, Vec limit) {
        return each([&](int i) { return x.v[i] < limit.v[i] ? 0.0f : a.v[i]; });
    }
    // The lanes [begin, end) of a, `fill` elsewhere.
    static Vec keep(Vec a, int begin, int end, Vec fill) {
        return each([&](int i) { return i >= begin && i < end ? a.v[i] : fill.v[i]; });
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
    static float widen(bf16 half) {
        const uint32_t bits = static_cast<uint32_t>(half.bits) << 16;
        float x;
        __builtin_memcpy(&x, &bits, 4);
        return x;
    }
    // Round to nearest even; a NaN stays one.
    static bf16 narrow(float x) {
        uint32_t bits;
        __builtin_memcpy(&bits, &x, 4);
        if (x != x) return {0x7fc0};
        return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
    }
};

constexpr int kTileRows = 4;
constexpr int tile_columns(int64_t) { return 2; }

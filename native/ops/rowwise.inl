// Norms, rotary embedding with KV write, activations and what else is done to each row by itself,
// float32 inside.

constexpr float kMinusInfinity = -__builtin_inff();

// x rounded to T, as a later load from memory would see it.
template <class T>
static inline Vec rounded(Vec x) {
    if constexpr (sizeof(T) == sizeof(float)) {
        return x;
    } else {
        T stored[Vec::kWidth];
        x.store(stored);
        return Vec::load(stored);
    }
}

static inline float inverse_rms(float sum_of_squares, int64_t size, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares / static_cast<float>(size) + eps);
}

// Sums x^2 in two interleaved chains, whose order depends on `size` alone.
struct SquareSum {
    Vec even = Vec::zero();
    Vec odd = Vec::zero();
    void add(Vec x) {
        const Vec sum = Vec::fma(x, x, even);
        even = odd;
        odd = sum;
    }
    float total() const { return (even + odd).sum(); }
};

template <class T>
static void rms_norm(const RmsNormArgs& args, int64_t begin, int64_t end) {
    const int64_t size = args.size;
    const T* weight = static_cast<const T*>(args.weight);
    const Vec offset = Vec::set(args.weight_offset);
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
        T* out = static_cast<T*>(args.out) + row * args.out_stride;
        SquareSum squares;
        if (args.residual) {
            T* residual = static_cast<T*>(args.residual) + row * size;
            for (int64_t i = 0; i < size; i += Vec::kWidth) {
                const int64_t left = size - i;
                const Vec sum = load_some(residual + i, left) + load_some(x + i, left);
                store_some(sum, residual + i, left);
                squares.add(rounded<T>(sum));
            }
            x = residual;
        } else {
            for (int64_t i = 0; i < size; i += Vec::kWidth) squares.add(load_some(x + i, size - i));
        }
        const Vec scale = Vec::set(inverse_rms(squares.total(), size, args.eps));
        for (int64_t i = 0; i < size; i += Vec::kWidth) {
            const int64_t left = size - i;
            const Vec factor = load_some(weight + i, left) + offset;
            store_some(load_some(x + i, left) * scale * factor, out + i, left);
        }
    }
}

// Ba, Kiros and Hinton, "Layer Normalization", 2016. The variance is that of the differences from the
// mean, in a pass of its own: their squares don't cancel.
template <class T>
static void layer_norm(const LayerNormArgs& args, int64_t begin, int64_t end) {
    const int64_t size = args.size;
    const T* weight = static_cast<const T*>(args.weight);
    const T* bias = static_cast<const T*>(args.bias);
    const Vec zero = Vec::zero();
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
        T* out = static_cast<T*>(args.out) + row * size;
        Vec sums = zero;
        if (args.residual) {
            T* residual = static_cast<T*>(args.residual) + row * size;
            for (int64_t i = 0; i < size; i += Vec::kWidth) {
                const int64_t left = size - i;
                const Vec sum = load_some(residual + i, left) + load_some(x + i, left);
                store_some(sum, residual + i, left);
                sums = sums + rounded<T>(sum);
            }
            x = residual;
        } else {
            for (int64_t i = 0; i < size; i += Vec::kWidth) sums = sums + load_some(x + i, size - i);
        }
        const Vec mean = Vec::set(sums.sum() / static_cast<float>(size));
        SquareSum squares;
        for (int64_t i = 0; i < size; i += Vec::kWidth) {
            const int64_t left = size - i;
            const Vec difference = load_some(x + i, left) - mean;
            squares.add(left < Vec::kWidth ? Vec::keep(difference, 0, static_cast<int>(left), zero)
                                           : difference);
        }
        const Vec scale = Vec::set(inverse_rms(squares.total(), size, args.eps));
        for (int64_t i = 0; i < size; i += Vec::kWidth) {
            const int64_t left = size - i;
            const Vec offset = bias ? load_some(bias + i, left) : zero;
            const Vec factor = scale * load_some(weight + i, left);
            store_some(Vec::fma(load_some(x + i, left) - mean, factor, offset), out + i, left);
        }
    }
}

// Turns the first dimensions of a head x by the angles of one position.
static inline void rotate_pairs(float* x, const float* cos, const float* sin, int64_t half,
                                bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            const float first = x[2 * i], second = x[2 * i + 1];
            x[2 * i] = first * cos[i] - second * sin[i];
            x[2 * i + 1] = second * cos[i] + first * sin[i];
        }
        return;
    }
    for (int64_t i = 0; i < half; i += Vec::kWidth) {
        const int64_t left = half - i;
        const Vec first = load_some(x + i, left), second = load_some(x + half + i, left);
        const Vec c = load_some(cos + i, left), s = load_some(sin + i, left);
        store_some(Vec::fma(first, c, Vec::zero() - second * s), x + i, left);
        store_some(Vec::fma(second, c, first * s), x + half + i, left);
    }
}

// One head: read, normalise, rotate, multiply, write; `from` and `to` may be the same.
template <class T>
static void rotate_head(const RotaryArgs& args, const T* from, T* to, const T* weight,
                        const float* cos, const float* sin, float factor) {
    const int64_t dim = args.head_dim;
    float x[kMaxHeadDim + Vec::kWidth];
    SquareSum squares;
    for (int64_t i = 0; i < dim; i += Vec::kWidth) {
        const Vec value = load_some(from + i, dim - i);
        squares.add(value);
        value.store(x + i);
    }
    if (weight) {
        const Vec scale = Vec::set(inverse_rms(squares.total(), dim, args.eps));
        const Vec offset = Vec::set(args.weight_offset);
        for (int64_t i = 0; i < dim; i += Vec::kWidth) {
            const Vec factor = load_some(weight + i, dim - i) + offset;
            (Vec::load(x + i) * scale * factor).store(x + i);
        }
    }
    if (cos) rotate_pairs(x, cos, sin, args.half, args.interleaved);
    for (int64_t i = 0; i < dim; i += Vec::kWidth)
        store_some(Vec::load(x + i) * Vec::set(factor), to + i, dim - i);
}

// A token's key, a step in every column of its page.
template <class T>
static inline void write_key(const T* key, int64_t steps, uint32_t* to, int64_t page_size) {
    const char* from = reinterpret_cast<const char*>(key);
    for (int64_t step = 0; step < steps; ++step)
        __builtin_memcpy(to + step * page_size, from + 4 * step, 4);
}

// A token's value. Of a pair nothing but its own half is written: the other may be another thread's.
static inline void write_value(const float* value, int64_t dim, int64_t offset, int64_t, float* to) {
    __builtin_memcpy(to + offset * dim, value, dim * sizeof(float));
}
static inline void write_value(const bf16* value, int64_t dim, int64_t offset, int64_t page_size,
                               bf16* to) {
    if (page_size % 2 == 1) {
        __builtin_memcpy(to + offset * dim, value, dim * sizeof(bf16));
        return;
    }
    to += offset / 2 * 2 * dim + offset % 2;
    for (int64_t i = 0; i < dim; ++i) to[2 * i] = value[i];
}

// A value that is no number breaks rows that don't see it as well: attention multiplies it by a weight
// of 0. So zeros are written in its place, and its key becomes NaN, which breaks those that see it.
template <class T>
static bool all_finite(const T* row, int64_t size) {
    Vec sum = Vec::zero();
    for (int64_t i = 0; i < size; i += Vec::kWidth)
        sum = Vec::fma(load_some(row + i, size - i), Vec::zero(), sum);  // infinity * 0 is NaN
    return sum.sum() == 0;
}

template <class T>
static void fill(T* row, int64_t size, float number) {
    for (int64_t i = 0; i < size; i += Vec::kWidth)
        store_some(Vec::set(number), row + i, size - i);
}

template <class T>
static void rotary_kv_write(const RotaryArgs& args, int64_t begin, int64_t end) {
    constexpr int64_t kPerStep = 4 / sizeof(T);
    const int64_t dim = args.head_dim, steps = (dim + kPerStep - 1) / kPerStep;
    for (int64_t token = begin; token < end; ++token) {
        const float* cos = nullptr;
        const float* sin = nullptr;
        if (args.cos) {
            cos = args.cos + args.positions[token] * args.half;
            sin = args.sin + args.positions[token] * args.half;
        }
        T* q = static_cast<T*>(args.q) + token * args.q_token_stride;
        const float factor = args.query_scale ? args.query_scale[args.positions[token]] : 1.0f;
        if (cos || args.q_norm) {
            for (int64_t head = 0; head < args.q_heads; ++head) {
                T* row = q + head * args.q_head_stride;
                rotate_head<T>(args, row, row, static_cast<const T*>(args.q_norm), cos, sin, factor);
            }
        }
        const int64_t page = args.slots[token] / args.page_size;
        const int64_t offset = args.slots[token] % args.page_size;
        const T* k = static_cast<const T*>(args.k) + token * args.k_token_stride;
        const T* v = static_cast<const T*>(args.v) + token * args.v_token_stride;
        for (int64_t head = 0; head < args.kv_heads; ++head) {
            const int64_t at = page * args.page_bytes + head * args.head_bytes;
            T key[kMaxHeadDim + 1];
            rotate_head<T>(args, k + head * args.k_head_stride, key,
                           static_cast<const T*>(args.k_norm), cos, sin, 1.0f);
            T zeros[kMaxHeadDim];
            const T* value = v + head * args.v_head_stride;
            if (!all_finite(value, dim)) {
                fill(key, dim, __builtin_nanf(""));
                fill(zeros, dim, 0.0f);
                value = zeros;
            }
            if (dim < steps * kPerStep) key[dim] = T{};
            write_key(key, steps, reinterpret_cast<uint32_t*>(args.k_pages + at) + offset,
                      args.page_size);
            write_value(value, dim, offset, args.page_size, reinterpret_cast<T*>(args.v_pages + at));
        }
    }
}

// x / (1 + exp(-y)) with y = x for silu. Gelu's approximation is 0.5 x (1 + tanh(u)) =
// x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3): the sum would cancel for negative x.
template <bool Gelu>
static inline Vec activated(Vec x) {
    Vec y = x;
    if constexpr (Gelu) {
        const Vec cube = Vec::fma(Vec::set(0.044715f) * x * x, x, x);
        y = Vec::set(1.595769122f) * cube;
    }
    return x / one_plus_exp_minus(y);
}

template <class T, bool Gelu>
static void gated(const GatedArgs& args, int64_t begin, int64_t end) {
    const int64_t size = args.size;
    for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(args.gate_up) + row * args.stride;
        const T* up = gate + size;
        T* out = static_cast<T*>(args.out) + row * size;
        for (int64_t i = 0; i < size; i += Vec::kWidth) {
            const int64_t left = size - i;
            const Vec x = activated<Gelu>(load_some(gate + i, left));
            store_some(x * load_some(up + i, left), out + i, left);
        }
    }
}

// The order of arguments lets NaN through.
static inline Vec at_most(Vec limit, Vec x) {
    return Vec::zero() - Vec::max(Vec::zero() - limit, Vec::zero() - x);
}

template <class T>
static void clamped_swiglu(const GatedArgs& args, int64_t begin, int64_t end) {
    const int64_t size = args.size;
    const Vec limit = Vec::set(args.limit), gain = Vec::set(args.gain), one = Vec::set(1.0f);
    for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(args.gate_up) + row * args.stride;
        const T* up = gate + size;
        T* out = static_cast<T*>(args.out) + row * size;
        for (int64_t i = 0; i < size; i += Vec::kWidth) {
            const int64_t left = size - i;
            const Vec x = at_most(limit, load_some(gate + i, left));
            const Vec y = at_most(limit, load_some(up + i, left));
            const Vec factor = Vec::max(Vec::zero() - limit, y) + one;
            store_some(factor * (x / one_plus_exp_minus(gain * x)), out + i, left);
        }
    }
}

// Gelu itself is x erfc(-x / sqrt(2)) / 2, of which no part cancels as max(x, 0) less the tail. Past 14
// the tail is nothing, and infinity would make no number of it.
template <Activation Kind>
static inline Vec activated_alone(Vec x) {
    if constexpr (Kind == Activation::gelu_tanh) return activated<true>(x);
    const Vec positive = Vec::max(Vec::zero(), x);
    if constexpr (Kind == Activation::relu_squared) return positive * positive;
    const Vec size = Vec::zero() - Vec::max(Vec::set(-14.0f), Vec::zero() - Vec::abs(x));
    return positive - Vec::set(0.5f) * size * erfc_positive(Vec::set(0.7071067812f) * size);
}

template <class T, Activation Kind>
static void activation(const ActivationArgs& args, int64_t begin, int64_t end) {
    const int64_t size = args.size;
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(args.x) + row * args.stride;
        T* out = static_cast<T*>(args.out) + row * size;
        for (int64_t i = 0; i < size; i += Vec::kWidth)
            store_some(activated_alone<Kind>(load_some(x + i, size - i)), out + i, size - i);
    }
}

template <class T>
static void add_rows(const AddRowsArgs& args, int64_t begin, int64_t end) {
    const int64_t size = args.size;
    for (int64_t row = begin; row < end; ++row) {
        T* x = static_cast<T*>(args.x) + row * size;
        const T* more = static_cast<const T*>(args.table) + (args.ids ? args.ids[row] : row) * size;
        for (int64_t i = 0; i < size; i += Vec::kWidth) {
            const int64_t left = size - i;
            store_some(load_some(x + i, left) + load_some(more + i, left), x + i, left);
        }
    }
}

template <class T>
static void scale(void* x, float factor, int64_t begin, int64_t end) {
    T* elements = static_cast<T*>(x);
    for (int64_t i = begin; i < end; i += Vec::kWidth)
        store_some(load_some(elements + i, end - i) * Vec::set(factor), elements + i, end - i);
}

static void soft_cap(float* x, float cap, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += Vec::kWidth)
        store_some(tanh(load_some(x + i, end - i) / Vec::set(cap)) * Vec::set(cap), x + i, end - i);
}

static Largest largest(const float* row, int64_t size) {
    // Lanes of the compiler's own: it makes of them what the instruction set has.
    constexpr int kLanes = 16;
    float tops[kLanes];
    int nans[kLanes] = {};
    for (float& top : tops) top = kMinusInfinity;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        for (int j = 0; j < kLanes; ++j) {
            const float x = row[i + j];
            tops[j] = x > tops[j] ? x : tops[j];
            nans[j] |= x != x;
        }
    }
    for (int j = 0; i < size; ++i, ++j) {
        tops[j] = row[i] > tops[j] ? row[i] : tops[j];
        nans[j] |= row[i] != row[i];
    }
    float top = kMinusInfinity;
    bool nan = false;
    for (int j = 0; j < kLanes; ++j) {
        top = tops[j] > top ? tops[j] : top;
        nan |= nans[j] != 0;
    }
    for (i = 0; nan ? row[i] == row[i] : row[i] != top;) ++i;
    return {row[i], i};
}

static void leave_out(const int32_t* mask, float* row, int64_t size) {
    constexpr int kBits = 32;
    int64_t i = 0;
    for (; i + kBits <= size; i += kBits) {
        const uint32_t bits = static_cast<uint32_t>(mask[i / kBits]);
        if (bits == 0xFFFFFFFF) continue;
        for (int j = 0; j < kBits; ++j) row[i + j] = bits >> j & 1 ? row[i + j] : kMinusInfinity;
    }
    for (int j = 0; i < size; ++i, ++j)
        if (!(static_cast<uint32_t>(mask[i / kBits]) >> j & 1)) row[i] = kMinusInfinity;
}

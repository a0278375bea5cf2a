// What a draw does to whole rows of logits. Each result depends on the row alone.

// Vectors that are taken together: their weights are summed, or bounded, at once.
constexpr int kPartVectors = 32;

static inline Vec gap_of(Vec x, const RowScale& scale) {
    const Vec y = (x - Vec::set(scale.largest)) * Vec::set(scale.factor);
    return Vec::zero() - Vec::max(y, Vec::set(-kWidestGap));
}

static inline Vec weight_of(Vec gap) { return exp2(Vec::zero() - gap); }

// The lanes past the `left` elements become `fill`.
static inline Vec ended(Vec x, int64_t left, Vec fill) {
    return left >= Vec::kWidth ? x : Vec::keep(x, 0, static_cast<int>(left), fill);
}

static double sum_weights(const float* row, int64_t size, const RowScale& scale) {
    double total = 0;
    for (int64_t i = 0; i < size;) {
        const int64_t most = i + kPartVectors * Vec::kWidth;
        const int64_t end = size < most ? size : most;
        Vec even = Vec::zero(), odd = Vec::zero();
        for (; i < end; i += Vec::kWidth) {
            const Vec weight = weight_of(gap_of(load_some(row + i, end - i), scale));
            const Vec sum = even + ended(weight, end - i, Vec::zero());
            even = odd;
            odd = sum;
        }
        total += static_cast<double>((even + odd).sum());
    }
    return total;
}

static void weigh(const float* logits, int64_t size, const RowScale& scale, float* gaps,
                  float* weights) {
    for (int64_t i = 0; i < size; i += Vec::kWidth) {
        const Vec gap = gap_of(load_some(logits + i, size - i), scale);
        store_some(gap, gaps + i, size - i);
        store_some(weight_of(gap), weights + i, size - i);
    }
}

static int64_t part_maxima(const float* row, int64_t size, float* maxima) {
    const Vec least = Vec::set(kMinusInfinity);
    int64_t count = 0;
    for (int64_t i = 0; i < size; count += Vec::kWidth) {
        const int64_t most = i + kPartVectors * Vec::kWidth;
        const int64_t end = size < most ? size : most;
        Vec top = least;
        for (; i < end; i += Vec::kWidth)
            top = Vec::max(top, ended(load_some(row + i, end - i), end - i, least));
        top.store(maxima + count);
    }
    return count;
}

static int64_t gather(const float* row, int64_t begin, int64_t end, float floor, int32_t* ids,
                      float* logits) {
    constexpr int64_t kScanned = 4 * Vec::kWidth;
    int64_t count = 0;
    for (int64_t i = begin; i < end; i += kScanned) {
        int64_t stop = end;
        if (end - i > kScanned) {
            stop = i + kScanned;
            const Vec top = Vec::max(Vec::max(Vec::load(row + i), Vec::load(row + i + Vec::kWidth)),
                                     Vec::max(Vec::load(row + i + 2 * Vec::kWidth),
                                              Vec::load(row + i + 3 * Vec::kWidth)));
            if (top.largest() < floor) continue;
        }
        for (int64_t j = i; j < stop; ++j) {
            ids[count] = static_cast<int32_t>(j);
            logits[count] = row[j];
            count += row[j] >= floor;
        }
    }
    return count;
}

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011): four words from each of some calls.
static inline void philox(const Noise& noise, Words calls, Vec (&words)[4]) {
    const Words first = Words::set(0xD2511F53u), second = Words::set(0xCD9E8D57u);
    Words c0 = Words::set(noise.position[0]), c1 = Words::set(noise.position[1]);
    Words c2 = calls, c3 = Words::set(kUpperWords);
    for (const auto& key : noise.keys) {
        const Words product0 = first * c0, product1 = second * c2;
        c0 = Words::xor_of(product1.upper(), c1, Words::set(key[0]));
        c1 = product1;
        c2 = Words::xor_of(product0.upper(), c3, Words::set(key[1]));
        c3 = product0;
    }
    words[0] = c0.joined();
    words[1] = c1.joined();
    words[2] = c2.joined();
    words[3] = c3.joined();
}

// Entries, up to `left`, that may be contenders. An exponential -log(1 - u) is at least u, u at least
// the upper 24 bits of its upper word, and log2 of a float at least what its bits, read as a number,
// say: less than 0.09 below it. A word without upper bits says -151.
static inline uint64_t contending(const float* logits, int64_t left, Vec words,
                                  const RowScale& scale, Vec limit) {
    const Vec gap = gap_of(load_some(logits, left), scale);
    const Vec bits = bits_as_number(upper_24_bits(words));
    const Vec least = Vec::fma(bits, Vec::set(0x1p-23f), gap + Vec::set(-127.0f - 24.0f));
    const uint32_t lanes = lanes_at_most(least, limit);
    return left >= Vec::kWidth ? lanes : lanes & ((1u << left) - 1);
}

static inline uint64_t contending_in_row(const float* logits, int64_t begin, int64_t size,
                                         const RowScale& scale, const Noise& noise, Vec limit) {
    static_assert(kRaceCalls % Vec::kWidth == 0);
    uint64_t found = 0;
    for (int64_t lane = 0; lane < kRaceCalls; lane += Vec::kWidth) {
        uint32_t calls[Vec::kWidth];
        for (int i = 0; i < Vec::kWidth; ++i)
            calls[i] = static_cast<uint32_t>(begin / 4 + lane + i);
        Vec words[4];
        philox(noise, Words::load(calls), words);
        for (int j = 0; j < 4; ++j) {
            const int64_t at = kRaceCalls * j + lane;
            if (begin + at >= size) break;
            found |= contending(logits + begin + at, size - begin - at, words[j], scale, limit) << at;
        }
    }
    return found;
}

static inline uint64_t contending_in_list(const float* logits, const int32_t* ids, int64_t begin,
                                          int64_t size, const RowScale& scale, const Noise& noise,
                                          Vec limit) {
    uint64_t found = 0;
    for (int64_t at = 0; at < kRaceBlock && begin + at < size; at += Vec::kWidth) {
        const int64_t left = size - begin - at;
        uint32_t listed[Vec::kWidth] = {}, calls[Vec::kWidth];
        for (int i = 0; i < Vec::kWidth && i < left; ++i)
            listed[i] = static_cast<uint32_t>(ids[begin + at + i]);
        for (int i = 0; i < Vec::kWidth; ++i)
            calls[i] = listed[i] / kRaceBlock * kRaceCalls + listed[i] % kRaceCalls;
        Vec words[4];
        philox(noise, Words::load(calls), words);
        float all[4][Vec::kWidth], own[Vec::kWidth];
        for (int j = 0; j < 4; ++j) words[j].store(all[j]);
        for (int i = 0; i < Vec::kWidth; ++i) own[i] = all[listed[i] / kRaceCalls % 4][i];
        found |= contending(logits + begin + at, left, Vec::load(own), scale, limit) << at;
    }
    return found;
}

static void find_contenders(const float* logits, const int32_t* ids, int64_t begin, int64_t size,
                            const RowScale& scale, const Noise& noise, float limit,
                            Contenders& contenders) {
    const Vec most = Vec::set(limit);
    uint64_t found = 0;
    for (; begin < size && !found; begin += kRaceBlock)
        found = ids ? contending_in_list(logits, ids, begin, size, scale, noise, most)
                    : contending_in_row(logits, begin, size, scale, noise, most);
    contenders.next = begin;
    contenders.count = 0;
    for (; found; found &= found - 1)
        contenders.at[contenders.count++] = begin - kRaceBlock + __builtin_ctzll(found);
}

constexpr SamplingKernels kSampling = {
    .sum_weights = sum_weights,
    .weigh = weigh,
    .part_maxima = part_maxima,
    .gather = gather,
    .find_contenders = find_contenders,
};

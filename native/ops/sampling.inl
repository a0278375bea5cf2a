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

static void sum_columns(const float* row, int64_t size, int64_t width, const RowScale& scale,
                        float* sums) {
    for (int64_t column = 0; column < width; column += Vec::kWidth) {
        Vec sum = Vec::zero();
        for (int64_t begin = column; begin < size; begin += width) {
            const int64_t of_line = width - column, of_row = size - begin;
            const int64_t left = of_line < of_row ? of_line : of_row;
            const Vec weight = weight_of(gap_of(load_some(row + begin, left), scale));
            sum = sum + ended(weight, left, Vec::zero());
        }
        store_some(sum, sums + column, width - column);
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

constexpr SamplingKernels kSampling = {
    .sum_weights = sum_weights,
    .weigh = weigh,
    .sum_columns = sum_columns,
    .part_maxima = part_maxima,
    .gather = gather,
};

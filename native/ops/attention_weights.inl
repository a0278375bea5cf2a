// From scores to weights: scale, soft cap and mask, then powers of two relative to the running maximum
// of each row.

constexpr float kLog2e = 1.442695041f;
constexpr float kLn2 = 0.693147181f;
constexpr float kLargest = 3.402823466e+38f;

// A partial result: per row the maximum score (in units of log2), the sum of the weights relative to
// it, and the weighted sum of the values.
struct Partial {
    float* maximum;
    float* sum;
    float* out;
    Partial(float* memory, int64_t rows)
        : maximum(memory), sum(memory + rows), out(memory + round_up(2 * rows, 16)) {}
};

// The place in the batch of a unit's token, and the index of its entry.
static inline int64_t row_of(const AttentionUnit& unit, int64_t token) {
    return unit.rows ? unit.rows[token] : unit.first_row + token;
}
static inline int64_t index_of(const AttentionUnit& unit, int64_t token) {
    return unit.index + (unit.rows ? unit.rows[token] - unit.rows[0] : token);
}

// 2^x for x of at most about 0, as precisely as T asks for: minimax polynomials on the reduced range,
// which are exactly 1 at 0.
template <class T>
static inline Vec weight_of(Vec x) {
    const Vec n = Vec::round(x), r = x - n;
    Vec p;
    if constexpr (kIsPaired<T>) {
        p = Vec::fma(Vec::set(9.582852945e-03f), r, Vec::set(5.590642616e-02f));
        p = Vec::fma(p, r, Vec::set(2.402409911e-01f));
        p = Vec::fma(p, r, Vec::set(6.931241751e-01f));
    } else {
        p = Vec::fma(Vec::set(1.326472731e-03f), r, Vec::set(9.671512991e-03f));
        p = Vec::fma(p, r, Vec::set(5.550733581e-02f));
        p = Vec::fma(p, r, Vec::set(2.402224243e-01f));
        p = Vec::fma(p, r, Vec::set(6.931470037e-01f));
    }
    p = Vec::fma(p, r, Vec::set(1.0f));
    return Vec::zero_below(Vec::scale(p, n), n, Vec::set(-125.0f));
}

// Of a row of scores the largest in each lane, of the keys [begin, end) alone; the others become minus
// infinity. With a soft cap the scores become what they are capped to, in units of log2.
[[gnu::always_inline]] static inline Vec largest_scores(const AttentionArgs& args, float* scores,
                                                        int64_t column, int64_t columns,
                                                        int64_t begin, int64_t end) {
    const Vec nothing = Vec::set(kMinusInfinity);
    const bool capped = args.soft_cap > 0;
    const bool masked = begin > column * Vec::kWidth || end < columns * Vec::kWidth;
    Vec top = nothing;
    for (int64_t i = column; i < columns; ++i) {
        Vec s = Vec::load(scores + i * Vec::kWidth);
        if (capped)
            s = tanh(s * Vec::set(args.scale / args.soft_cap)) * Vec::set(args.soft_cap * kLog2e);
        if (masked) {
            const int64_t lane = i * Vec::kWidth;
            s = Vec::keep(s, static_cast<int>(begin - lane), static_cast<int>(end - lane), nothing);
        }
        if (capped || masked) s.store(scores + i * Vec::kWidth);
        top = Vec::max(top, s);
    }
    return top;
}

// A row of scores to weights 2^(unit * score - reference), in place; adds them up in `sums`, by lane,
// after `factor` times what was there.
template <class T>
[[gnu::always_inline]] static inline void weigh(float* scores, int64_t column, int64_t columns,
                                                float unit, float reference, float factor,
                                                float* sums) {
    const Vec units = Vec::set(unit), subtract = Vec::set(-reference);
    const auto exponent = [&](int64_t i) __attribute__((always_inline)) {
        return Vec::fma(Vec::load(scores + i * Vec::kWidth), units, subtract);
    };
    Vec sum = Vec::zero();
    if constexpr (kDot<T>) {
        // The sum takes the weights as they are multiplied, so that they still add up to one.
        const Vec nothing = Vec::set(kMinusInfinity);
        for (int64_t i = column / 2 * 2; i < columns; i += 2) {
            const Vec first = i < column ? nothing : exponent(i);
            const Vec second = i + 1 < columns ? exponent(i + 1) : nothing;
            sum = store_powers(first, second, reinterpret_cast<T*>(scores) + i * Vec::kWidth, sum);
        }
    } else {
        for (int64_t i = column; i < columns; ++i) {
            const Vec weight = weight_of<T>(exponent(i));
            weight.store(scores + i * Vec::kWidth);
            sum = sum + weight;
        }
    }
    Vec::fma(Vec::load(sums), Vec::set(factor), sum).store(sums);
}

// What rows need beside their queries and results.
template <class T>
struct Working {
    float *q, *scores, *sums, *factors, *references, *copies, *widened;

    Working(float* work, const Shape<T>& shape) {
        const int64_t rows = shape.padded_rows;
        q = work;
        scores = q + rows * shape.q_stride;
        sums = scores + rows * kKeyBlock;
        factors = sums + rows * Vec::kWidth;
        references = factors + rows;
        copies = work + shape.for_rows();
        widened = copies + shape.copies();
    }
};

// The scores of some rows, at `scores`, to weights, in place. Updates their maxima, and leaves the
// factor for what came before in `factors`.
template <class T>
static void weigh_rows(const AttentionArgs& args, const AttentionUnit& unit, const Block<T>& block,
                       int64_t first_row, int64_t end_row, float* scores, const Working<T>& at,
                       const Partial& partial) {
    // A tile of weights is multiplied whole, so that all of it must be weights.
    constexpr int64_t kKeys = kInTiles<T> ? 32 : Vec::kWidth, kVectors = kKeys / Vec::kWidth;
    const int64_t column = (block.begin - block.base) / kKeys * kVectors;
    const int64_t columns = round_up(block.end - block.base, kKeys) / Vec::kWidth;
    constexpr int64_t kWhole = kKeyBlock / Vec::kWidth;
    const bool whole = column == 0 && columns == kWhole;  // as most blocks are
    const auto index_in_block = [&](int64_t row) {
        return index_of(unit, row / args.group) - block.base;
    };
    const bool all_seen = whole && !args.window && index_in_block(first_row) >= kKeyBlock - 1;
    // Scores are positive multiples of what they count as; capped ones are that already.
    const float one = args.soft_cap > 0 ? 1.0f : args.scale * kLog2e;
    const auto scores_of = [&](int64_t row) { return scores + (row - first_row) * kKeyBlock; };
    for (int64_t row = first_row; row < end_row; row += Vec::kWidth) {
        const int64_t left = end_row - row, count = left < Vec::kWidth ? left : Vec::kWidth;
        Vec tops[Vec::kWidth];
        for (int64_t i = 0; i < count; ++i) {
            if (all_seen) {
                tops[i] = largest_scores(args, scores_of(row + i), 0, kWhole, 0, kKeyBlock);
                continue;
            }
            const int64_t index = index_in_block(row + i);
            const int64_t oldest = args.window ? index - args.window + 1 : 0;
            tops[i] = largest_scores(args, scores_of(row + i), column, columns,
                                     oldest > 0 ? oldest : 0, index + 1);
        }
        const Vec before = load_some(partial.maximum + row, left);
        const Vec maximum = Vec::max(largest_of_each(tops, count) * Vec::set(one), before);
        // A row that has seen no key yet: any finite reference will do.
        const Vec reference = Vec::zero_below(maximum, maximum, Vec::set(-kLargest));
        store_some(maximum, partial.maximum + row, left);
        store_some(reference, at.references + row, left);
        store_some(exp2(before - reference), at.factors + row, left);
    }
    for (int64_t row = first_row; row < end_row; ++row) {
        float* const sums = at.sums + row * Vec::kWidth;
        const float reference = at.references[row], factor = at.factors[row];
        if (whole) {
            weigh<T>(scores_of(row), 0, kWhole, one, reference, factor, sums);
        } else {
            weigh<T>(scores_of(row), column, columns, one, reference, factor, sums);
        }
    }
}

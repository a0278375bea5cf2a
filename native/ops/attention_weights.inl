// From scores to weights: scale, soft cap and mask, then powers of two relative to the running maximum
// of each row.

constexpr float kLog2e = 1.442695041f;

// A partial result: per row the maximum score (in units of log2), the sum of the weights relative to
// it, and the weighted sum of the values.
struct Partial {
    float* maximum;
    float* sum;
    float* out;
    Partial(float* memory, int64_t rows)
        : maximum(memory), sum(memory + rows), out(memory + round_up(2 * rows, 16)) {}
};

// The place in the batch of a unit's token, and its place in the sequence.
static inline int64_t row_of(const AttentionUnit& unit, int64_t token) {
    return unit.rows ? unit.rows[token] : unit.first_row + token;
}
static inline int64_t position_of(const AttentionUnit& unit, int64_t token) {
    return unit.position + (unit.rows ? unit.rows[token] - unit.rows[0] : token);
}

// 2^x for x of at most about 0, as precisely as T asks for: minimax polynomials on the reduced range,
// which are exactly 1 at 0.
template <class T>
static inline Vec weight_of(Vec x) {
    const Vec n = Vec::round(x), r = x - n;
    Vec p;
    if constexpr (kDot<T>) {  // to be rounded to 8 bits
        p = Vec::fma(Vec::set(5.500893295e-02f), r, Vec::set(2.422109693e-01f));
        p = Vec::fma(p, r, Vec::set(6.932829022e-01f));
    } else if constexpr (kIsPaired<T>) {
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

// The largest of a row of scores, of the keys [begin, end) alone; the others become minus infinity.
// With a soft cap the scores become what they are capped to, in units of log2.
static inline float largest_score(const AttentionArgs& args, float* scores, int64_t column,
                                  int64_t columns, int64_t begin, int64_t end) {
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
    return top.largest();
}

// A row of scores to weights 2^(unit * score - reference), in place; adds them up in `sums`, by lane,
// after `factor` times what was there.
template <class T>
static inline void weigh(float* scores, int64_t column, int64_t columns, float unit,
                         float reference, float factor, float* sums) {
    const Vec units = Vec::set(unit), subtract = Vec::set(-reference);
    Vec sum = Vec::zero();
    for (int64_t i = column; i < columns; ++i) {
        const Vec weight =
            weight_of<T>(Vec::fma(Vec::load(scores + i * Vec::kWidth), units, subtract));
        if constexpr (kDot<T>) {
            // The sum takes the weights as they are multiplied, so that they still add up to one.
            sum = sum + store_rounded(weight, reinterpret_cast<T*>(scores) + i * Vec::kWidth);
        } else {
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
    // Scores are positive multiples of what they count as; capped ones are that already.
    const float one = args.soft_cap > 0 ? 1.0f : args.scale * kLog2e;
    for (int64_t row = first_row; row < end_row; ++row) {
        const int64_t position = position_of(unit, row / args.group) - block.base;
        const int64_t oldest = args.window ? position - args.window + 1 : 0;
        const float top =
            one * largest_score(args, scores + (row - first_row) * kKeyBlock, column, columns,
                                oldest > 0 ? oldest : 0, position + 1);
        const float before = partial.maximum[row], maximum = top > before ? top : before;
        partial.maximum[row] = maximum;
        // A row that has seen no key yet: any finite reference will do.
        at.references[row] = maximum == kMinusInfinity ? 0.0f : maximum;
        at.factors[row] = before - at.references[row];
    }
    for (int64_t row = first_row; row < end_row; row += Vec::kWidth) {
        const int64_t left = end_row - row;
        store_some(exp2(load_some(at.factors + row, left)), at.factors + row, left);
    }
    for (int64_t row = first_row; row < end_row; ++row)
        weigh<T>(scores + (row - first_row) * kKeyBlock, column, columns, one, at.references[row],
                 at.factors[row], at.sums + row * Vec::kWidth);
}

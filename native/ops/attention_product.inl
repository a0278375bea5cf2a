// Products of a matrix of rows with the keys or values of a block: register tiles over the `Vec` in
// scope. Every element of a result is one chain of multiply-adds in the order of the steps, however
// many rows share the tile.

// A step of the summed dimension: one float, a pair of bfloat16 that is multiplied as it is, or a
// pair that is widened to floats while it is read, whose other factor is two floats.
enum class Steps { floats, pairs, widened };

template <Steps kSteps>
constexpr int64_t kFloatsPerStep = kSteps == Steps::widened ? 2 : 1;

// The matrix B: step p of the vector of columns c starts at `at(p, c)`.
template <int64_t kWidth>
struct Columns {
    static constexpr int64_t kFloats = kWidth;
    const float* const* vectors;
    int64_t stride;
    const float* at(int64_t p, int64_t c) const { return vectors[c] + p * stride; }
};
struct Rows {
    static constexpr int64_t kFloats = Vec::kWidth;
    const float* const* rows;
    const float* at(int64_t p, int64_t c) const { return rows[p] + c * Vec::kWidth; }
};

// C = A B, or C = rescale * C + A B (one factor per row) where `rescale` is given, over the steps
// [begin, end).
struct Product {
    const float* a;
    int64_t a_stride;
    int64_t begin, end;
    float* c;
    int64_t c_stride;
    const float* rescale;
};

template <class B>
static inline void fetch_ahead(const B& ahead, int64_t p, int64_t column) {
    // Into the second level, since the first can wait for few lines at a time.
    __builtin_prefetch(ahead.at(p, column), 0, 2);
}
struct Nothing {};
static inline void fetch_ahead(Nothing, int64_t, int64_t) {}

// Meanwhile the same elements of `ahead` are fetched: a few lines at a time, since a burst would
// stall this product.
template <Steps kSteps, int R, int C, class B, class Ahead>
static inline void tile(const Product& m, const B& b, const Ahead& ahead, int64_t row,
                        int64_t column) {
    constexpr int64_t kFloats = kFloatsPerStep<kSteps>;
    const float* a = m.a + row * m.a_stride;
    float* c = m.c + row * m.c_stride + column * Vec::kWidth;
    Vec sum[R][C];
    for (int i = 0; i < R; ++i) {
        for (int j = 0; j < C; ++j) {
            sum[i][j] = Vec::zero();
            if (m.rescale)
                sum[i][j] = Vec::load(c + i * m.c_stride + j * Vec::kWidth) *
                            Vec::set(m.rescale[row + i]);
        }
    }
    for (int64_t p = m.begin; p < m.end; ++p) {
        Vec right[C];
        for (int j = 0; j < C; ++j) {
            right[j] = Vec::load(b.at(p, column + j));
            fetch_ahead(ahead, p, column + j);
        }
        for (int i = 0; i < R; ++i) {
            const float* left = a + i * m.a_stride + p * kFloats;
            if constexpr (kSteps == Steps::widened) {
                const Vec first = Vec::set_bits(left), second = Vec::set_bits(left + 1);
                for (int j = 0; j < C; ++j)
                    sum[i][j] = Vec::fma(first, right[j].first_halves(), sum[i][j]);
                for (int j = 0; j < C; ++j)
                    sum[i][j] = Vec::fma(second, right[j].second_halves(), sum[i][j]);
            } else {
                const Vec one = Vec::set_bits(left);
                for (int j = 0; j < C; ++j) {
                    if constexpr (kSteps == Steps::pairs) {
                        sum[i][j] = dot_bf16(one, right[j], sum[i][j]);
                    } else {
                        sum[i][j] = Vec::fma(one, right[j], sum[i][j]);
                    }
                }
            }
        }
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < C; ++j) sum[i][j].store(c + i * m.c_stride + j * Vec::kWidth);
}

template <Steps kSteps, int R, int C, class B, class Ahead>
static void tile_row(const Product& m, const B& b, const Ahead& ahead, int64_t row, int64_t column,
                     int64_t columns) {
    for (; column + C <= columns; column += C) tile<kSteps, R, C>(m, b, ahead, row, column);
    if constexpr (C > 1) {
        if (column < columns) tile_row<kSteps, R, C / 2>(m, b, ahead, row, column, columns);
    }
}

// The kProductRows rows or fewer from `row` on.
template <Steps kSteps, int R, class B, class Ahead>
static void last_rows(const Product& m, const B& b, const Ahead& ahead, int64_t row, int64_t rows,
                      int64_t column, int64_t columns) {
    if (rows - row == R) {
        tile_row<kSteps, R, tile_columns(R)>(m, b, ahead, row, column, columns);
    } else if constexpr (R > 1) {
        last_rows<kSteps, R - 1>(m, b, ahead, row, rows, column, columns);
    }
}

// At most kProductRows rows, and the vectors of columns [column, columns).
template <Steps kSteps, class B, class Ahead>
static void multiply_few(const Product& m, const B& b, const Ahead& ahead, int64_t rows,
                         int64_t column, int64_t columns) {
    last_rows<kSteps, kProductRows>(m, b, ahead, 0, rows, column, columns);
}

template <Steps kSteps, class B>
static void multiply(const Product& m, const B& b, int64_t rows, int64_t column, int64_t columns) {
    int64_t row = 0;
    for (; row + kProductRows <= rows; row += kProductRows)
        tile_row<kSteps, kProductRows, tile_columns(kProductRows)>(m, b, Nothing{}, row, column, columns);
    last_rows<kSteps, kProductRows - 1>(m, b, Nothing{}, row, rows, column, columns);
}

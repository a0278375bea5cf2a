// Paged attention: softmax(Q K^T) V in one pass over the keys, after Dao et al., "FlashAttention",
// 2022 (the running maximum and sum of Milakov and Gimelshein, 2018), on pages as in Kwon et al.,
// "PagedAttention", 2023.
//
// A unit is the rows (tokens x grouped heads) that share the keys of one KV head, from a single
// decode to a whole block of a prefill. Per block of 64 keys: transpose K once, so that a register
// holds one dimension of several keys and each score is one chain of multiply-adds over the
// dimensions; scale, mask, exponentiate; then add P V, one chain over the keys. Every score and sum
// takes the same steps in the same order however many rows share the tile, which is what makes a
// decode and a prefill agree to the last bit.
//
// Scratch matrices hold 32-bit elements: a float, or with `kDot` a pair of bfloat16 along the
// summed dimension.

template <class T>
constexpr bool kDot = kBfloat16Pairs && sizeof(T) == sizeof(bf16);

constexpr float kLog2e = 1.442695041f;

static inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// c + a * b: a is one element in every lane.
template <bool Dot, class V>
static inline V multiply_add(V a, V b, V c) {
    if constexpr (Dot) {
        return dot_bf16(a, b, c);
    } else {
        return V::fma(a, b, c);
    }
}

// Row p of a matrix that is dense, or given row by row.
struct Dense {
    const float* rows;
    int64_t stride;
    const float* operator()(int64_t p) const { return rows + p * stride; }
};
struct Scattered {
    const float* const* rows;
    const float* operator()(int64_t p) const { return rows[p]; }
};

// C = A B, or C = rescale * C + A B (one factor per row) where `rescale` is given.
struct Product {
    const float* a;
    int64_t a_stride;
    int64_t depth;
    float* c;
    int64_t c_stride;
    const float* rescale;
};

template <bool Dot, int R, int C, class Rows>
static inline void tile(const Product& m, const Rows& b, int64_t row, int64_t column) {
    const float* a = m.a + row * m.a_stride;
    float* c = m.c + row * m.c_stride + column;
    Vec sum[R][C];
    for (int i = 0; i < R; ++i) {
        for (int j = 0; j < C; ++j) {
            sum[i][j] = Vec::zero();
            if (m.rescale)
                sum[i][j] = Vec::load(c + i * m.c_stride + j * Vec::kWidth) *
                            Vec::set(m.rescale[row + i]);
        }
    }
    for (int64_t p = 0; p < m.depth; ++p) {
        const float* b_row = b(p) + column;
        Vec right[C];
        for (int j = 0; j < C; ++j) right[j] = Vec::load(b_row + j * Vec::kWidth);
        for (int i = 0; i < R; ++i) {
            const Vec left = Vec::set_bits(a + i * m.a_stride + p);
            for (int j = 0; j < C; ++j) sum[i][j] = multiply_add<Dot>(left, right[j], sum[i][j]);
        }
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < C; ++j) sum[i][j].store(c + i * m.c_stride + j * Vec::kWidth);
}

template <bool Dot, int R, int C, class Rows>
static void tile_row(const Product& m, const Rows& b, int64_t row, int64_t columns) {
    int64_t column = 0;
    for (; column + C * Vec::kWidth <= columns; column += C * Vec::kWidth)
        tile<Dot, R, C>(m, b, row, column);
    if constexpr (C > 1) {
        const int64_t left = (columns - column) / Vec::kWidth;
        if (left == 1) tile<Dot, R, 1>(m, b, row, column);
        if constexpr (C > 2) {
            if (left == 2) tile<Dot, R, 2>(m, b, row, column);
            if (left == 3) tile<Dot, R, 3>(m, b, row, column);
        }
    }
}

// The fewer than kTileRows rows from `row` on.
template <bool Dot, int R, class Rows>
static void last_rows(const Product& m, const Rows& b, int64_t row, int64_t rows, int64_t columns) {
    if (rows - row == R) {
        tile_row<Dot, R, tile_columns(R)>(m, b, row, columns);
    } else if constexpr (R > 1) {
        last_rows<Dot, R - 1>(m, b, row, rows, columns);
    }
}

// `columns` is a multiple of the vector width.
template <bool Dot, class Rows>
static void multiply(const Product& m, const Rows& b, int64_t rows, int64_t columns) {
    int64_t row = 0;
    for (; row + kTileRows <= rows; row += kTileRows)
        tile_row<Dot, kTileRows, tile_columns(kTileRows)>(m, b, row, columns);
    last_rows<Dot, kTileRows - 1>(m, b, row, rows, columns);
}

// The vector of 32-bit elements that starts at element `at` of a row of `size` values.
template <class T>
static inline Vec load_elements(const T* row, int64_t at, int64_t size) {
    if constexpr (kDot<T>) {
        return load_pairs(row + 2 * at, size - 2 * at);
    } else {
        return load_some(row + at, size - at);
    }
}

// Sizes of a unit's matrices, in 32-bit elements.
template <class T>
struct Shape {
    int64_t rows, dim;
    int64_t depth;         // of Q K^T
    int64_t q_stride;      // depth in whole vectors
    int64_t padded_dim;    // columns of V and of the output, in whole vectors

    Shape(int64_t rows_, int64_t dim_) : rows(rows_), dim(dim_) {
        depth = kDot<T> ? (dim + 1) / 2 : dim;
        q_stride = round_up(depth, Vec::kWidth);
        padded_dim = round_up(dim, Vec::kWidth);
    }
    int64_t partial() const { return partial_floats(rows, dim); }
    int64_t work() const {
        return round_up(rows * (q_stride + kKeyBlock + Vec::kWidth + 1), 16) +
               (depth + padded_dim) * kKeyBlock;
    }
};

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

template <class T>
static void pack_queries(const AttentionArgs& args, const AttentionUnit& unit, const Shape<T>& shape,
                         float* q) {
    for (int64_t row = 0; row < shape.rows; ++row) {
        const int64_t token = row_of(unit, row / args.group);
        const int64_t head = unit.kv_head * args.group + row % args.group;
        const T* from = static_cast<const T*>(args.q) + token * args.q_token_stride +
                        head * args.q_head_stride;
        for (int64_t i = 0; i < shape.q_stride; i += Vec::kWidth)
            load_elements(from, i, shape.dim).store(q + row * shape.q_stride + i);
    }
}

// The keys of a unit in one block, and where they and their values lie. Positions outside
// [begin, end) read as zeros, so that whatever their pages hold is never seen.
template <class T>
struct Block {
    int64_t base, begin, end;
    const T* k[kKeyBlock];
    const T* v[kKeyBlock];

    // The block with position `at`.
    void locate(const AttentionArgs& args, const AttentionUnit& unit, int64_t at) {
        base = at / kKeyBlock * kKeyBlock;
        begin = unit.first_key > base ? unit.first_key : base;
        end = unit.end_key < base + kKeyBlock ? unit.end_key : base + kKeyBlock;
        const T* zeros = reinterpret_cast<const T*>(kZeros);
        for (int64_t i = 0; i < begin - base; ++i) k[i] = v[i] = zeros;
        for (int64_t i = end - base; i < kKeyBlock; ++i) k[i] = v[i] = zeros;
        for (int64_t position = begin; position < end;) {
            const int64_t page = position / args.page_size, first = position % args.page_size;
            const int64_t left = args.page_size - first;
            const int64_t count = left < end - position ? left : end - position;
            const int64_t row =
                ((unit.pages[page] * args.kv_heads + unit.kv_head) * args.page_size + first) *
                args.head_dim;
            const T* k_row = static_cast<const T*>(args.k_pages) + row;
            const T* v_row = static_cast<const T*>(args.v_pages) + row;
            for (int64_t i = 0; i < count; ++i) {
                k[position - base + i] = k_row + i * args.head_dim;
                v[position - base + i] = v_row + i * args.head_dim;
            }
            position += count;
        }
    }

    // Ask for the cache lines `at` bytes into some rows. A page ends before the hardware has seen a
    // stream in it. Into the second level, since the first can wait for few lines at a time.
    void fetch(int64_t row, int64_t count, int64_t at) const {
        for (int64_t i = row; i < row + count; ++i) {
            __builtin_prefetch(reinterpret_cast<const char*>(k[i]) + at, 0, 2);
            __builtin_prefetch(reinterpret_cast<const char*>(v[i]) + at, 0, 2);
        }
    }
};

// Keys to `packed[depth][kKeyBlock]`; `columns` of them, in whole vectors. Meanwhile the block
// `after` is fetched, unless null: a few lines at a time, since a burst would stall this one.
template <class T>
static void pack_keys(const T* const* rows, const Shape<T>& shape, int64_t columns, float* packed,
                      const Block<T>* after) {
    constexpr int64_t kBytes = kDot<T> ? sizeof(float) : sizeof(T);
    for (int64_t column = 0; column < columns; column += Vec::kWidth) {
        for (int64_t i = 0; i < shape.depth; i += Vec::kWidth) {
            if (after && i * kBytes % 64 == 0) after->fetch(column, Vec::kWidth, i * kBytes);
            Vec square[Vec::kWidth];
            if ((i + Vec::kWidth) * (kDot<T> ? 2 : 1) <= shape.dim) {
                for (int j = 0; j < Vec::kWidth; ++j)
                    square[j] = load_elements(rows[column + j], i, INT64_MAX);
                Vec::transpose(square);
                for (int j = 0; j < Vec::kWidth; ++j)
                    square[j].store(packed + (i + j) * kKeyBlock + column);
                continue;
            }
            for (int j = 0; j < Vec::kWidth; ++j)
                square[j] = load_elements(rows[column + j], i, shape.dim);
            Vec::transpose(square);
            for (int j = 0; i + j < shape.depth; ++j)
                square[j].store(packed + (i + j) * kKeyBlock + column);
        }
    }
}

// Points `out` at the rows of V as 32-bit elements, `padded_dim` wide; copies where it must.
template <class T>
static void pack_values(const T* const* rows, const Shape<T>& shape, int64_t depth, float* packed,
                        const float** out) {
    for (int64_t p = 0; p < depth; ++p) {
        float* to = packed + p * shape.padded_dim;
        if constexpr (kDot<T>) {
            interleave(rows[2 * p], rows[2 * p + 1], shape.dim, to);
        } else {
            if constexpr (sizeof(T) == sizeof(float)) {
                if (shape.dim == shape.padded_dim) {
                    out[p] = rows[p];
                    continue;
                }
            }
            for (int64_t i = 0; i < shape.dim; i += Vec::kWidth)
                load_some(rows[p] + i, shape.dim - i).store(to + i);
        }
        out[p] = to;
    }
}

// One row of scores to weights, in place: scale, soft cap, the keys [begin, end) only, 2^(s - max).
// Updates the row's maximum and its sums per lane; returns the factor for what came before.
template <class T>
static inline float weigh(const AttentionArgs& args, float* scores, int64_t columns, int64_t begin,
                          int64_t end, float& maximum, float* sums) {
    constexpr int kVectors = kKeyBlock / Vec::kWidth;
    const int used = static_cast<int>(columns / Vec::kWidth);
    const Vec nothing = Vec::set(kMinusInfinity);
    const bool masked = begin > 0 || end < columns;
    const Vec scale = Vec::set(args.scale * kLog2e);
    Vec s[kVectors];
    Vec top = nothing;
    for (int i = 0; i < used; ++i) {
        s[i] = Vec::load(scores + i * Vec::kWidth);
        if (args.soft_cap > 0) {
            s[i] = tanh(s[i] * Vec::set(args.scale / args.soft_cap)) *
                   Vec::set(args.soft_cap * kLog2e);
        } else {
            s[i] = s[i] * scale;
        }
        if (masked) {
            const int64_t lane = i * Vec::kWidth;
            s[i] = Vec::keep(s[i], static_cast<int>(begin - lane), static_cast<int>(end - lane),
                             nothing);
        }
        top = Vec::max(top, s[i]);
    }
    const float block_maximum = top.largest();
    const float before = maximum;
    if (block_maximum > maximum) maximum = block_maximum;
    // A row that has seen no key yet: any finite reference will do.
    const float reference = maximum == kMinusInfinity ? 0.0f : maximum;
    const Vec subtract = Vec::set(reference);
    Vec sum = Vec::zero();
    for (int i = 0; i < used; ++i) {
        const Vec weight = exp2(s[i] - subtract);
        if constexpr (kDot<T>) {
            // The sum takes the weights as they are multiplied, so that they still add up to one.
            sum = sum + store_rounded(weight, reinterpret_cast<T*>(scores) + i * Vec::kWidth);
        } else {
            weight.store(scores + i * Vec::kWidth);
            sum = sum + weight;
        }
    }
    const float factor = exp2(Vec::set(before - reference)).front();
    Vec::fma(Vec::load(sums), Vec::set(factor), sum).store(sums);
    return factor;
}

// The keys of one split (counted over the whole sequence) against all rows of the unit. A decode
// does so little with each key that it waits for memory: each block asks for the one after, which
// may be the first of the `next` unit.
template <class T>
static void attend(const AttentionArgs& args, const AttentionUnit& unit, const AttentionUnit* next,
                   int64_t split, const Shape<T>& shape, float* memory, float* work) {
    const int64_t rows = shape.rows;
    float* q = work;
    float* scores = q + rows * shape.q_stride;
    float* sums = scores + rows * kKeyBlock;
    float* factors = sums + rows * Vec::kWidth;
    float* keys = work + round_up(rows * (shape.q_stride + kKeyBlock + Vec::kWidth + 1), 16);
    float* values = keys + shape.depth * kKeyBlock;
    const Partial partial(memory, rows);

    pack_queries(args, unit, shape, q);
    for (int64_t i = 0; i < rows; ++i) partial.maximum[i] = kMinusInfinity;
    for (int64_t i = 0; i < rows * Vec::kWidth; ++i) sums[i] = 0;
    for (int64_t i = 0; i < rows * shape.padded_dim; ++i) partial.out[i] = 0;

    const int64_t first = split * kSplitKeys, last = first + kSplitKeys;
    Block<T> blocks[2];
    Block<T>* block = &blocks[0];
    Block<T>* ahead = &blocks[1];
    block->locate(args, unit, first > unit.first_key ? first : unit.first_key);
    while (true) {
        const int64_t base = block->base, after = base + kKeyBlock;
        const AttentionUnit* coming = after < unit.end_key ? &unit : next;
        if (coming) ahead->locate(args, *coming, coming == &unit ? after : next->first_key);
        const int64_t columns = round_up(block->end - base, Vec::kWidth);
        pack_keys(block->k, shape, columns, keys, coming ? ahead : nullptr);
        const Product score{q, shape.q_stride, shape.depth, scores, kKeyBlock, nullptr};
        multiply<kDot<T>>(score, Dense{keys, kKeyBlock}, rows, columns);
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t position = position_of(unit, row / args.group) - base;
            const int64_t oldest = args.window ? position - args.window + 1 : 0;
            factors[row] = weigh<T>(args, scores + row * kKeyBlock, columns,
                                    oldest > 0 ? oldest : 0, position + 1, partial.maximum[row],
                                    sums + row * Vec::kWidth);
        }
        const int64_t depth = kDot<T> ? (block->end - base + 1) / 2 : block->end - base;
        const float* value_rows[kKeyBlock];
        pack_values(block->v, shape, depth, values, value_rows);
        const Product mix{scores, kKeyBlock, depth, partial.out, shape.padded_dim, factors};
        multiply<kDot<T>>(mix, Scattered{value_rows}, rows, shape.padded_dim);
        if (after >= last || after >= unit.end_key) break;
        Block<T>* done = block;
        block = ahead;
        ahead = done;
    }
    for (int64_t row = 0; row < rows; ++row)
        partial.sum[row] = Vec::load(sums + row * Vec::kWidth).sum();
}

// Fold the partial of later keys into that of earlier ones.
template <class T>
static void merge(const Shape<T>& shape, const Partial& into, const Partial& from) {
    for (int64_t row = 0; row < shape.rows; ++row) {
        const float a = into.maximum[row], b = from.maximum[row];
        const float maximum = b > a ? b : a;
        const float reference = maximum == kMinusInfinity ? 0.0f : maximum;
        const Vec keep = exp2(Vec::set(a - reference)), add = exp2(Vec::set(b - reference));
        into.maximum[row] = maximum;
        const Vec sum = Vec::fma(Vec::set(into.sum[row]), keep, Vec::set(from.sum[row]) * add);
        into.sum[row] = sum.front();
        float* out = into.out + row * shape.padded_dim;
        const float* more = from.out + row * shape.padded_dim;
        for (int64_t i = 0; i < shape.padded_dim; i += Vec::kWidth)
            Vec::fma(Vec::load(out + i), keep, Vec::load(more + i) * add).store(out + i);
    }
}

template <class T>
static void finish(const AttentionArgs& args, const AttentionUnit& unit, const Shape<T>& shape,
                   const Partial& total) {
    for (int64_t row = 0; row < shape.rows; ++row) {
        const int64_t token = unit.first_row + row / args.group;
        const int64_t head = unit.kv_head * args.group + row % args.group;
        T* out = static_cast<T*>(args.out) +
                 (token * args.kv_heads * args.group + head) * shape.dim;
        const Vec scale = Vec::set(1.0f / total.sum[row]);
        for (int64_t i = 0; i < shape.dim; i += Vec::kWidth) {
            const Vec x = Vec::load(total.out + row * shape.padded_dim + i) * scale;
            store_some(x, out + i, shape.dim - i);
        }
    }
}

template <class T>
static void attention(const AttentionArgs& args, const AttentionUnit& unit,
                      const AttentionUnit* next) {
    const Shape<T> shape(unit.tokens * args.group, args.head_dim);
    float* first = scratch(2 * shape.partial() + shape.work());
    float* later = first + shape.partial();
    float* work = later + shape.partial();
    const int64_t split = unit.first_split(), splits = unit.num_splits();
    const Partial total(first, shape.rows);
    attend(args, unit, next, split, shape, first, work);
    for (int64_t i = 1; i < splits; ++i) {
        attend(args, unit, next, split + i, shape, later, work);
        merge(shape, total, Partial(later, shape.rows));
    }
    finish(args, unit, shape, total);
}

template <class T>
static void attention_split(const AttentionArgs& args, const AttentionUnit& unit, int64_t split,
                            float* partial) {
    const Shape<T> shape(unit.tokens * args.group, args.head_dim);
    attend<T>(args, unit, nullptr, unit.first_split() + split, shape, partial,
              scratch(shape.work()));
}

template <class T>
static void attention_merge(const AttentionArgs& args, const AttentionUnit& unit, float* partials,
                            int64_t stride) {
    const Shape<T> shape(unit.tokens * args.group, args.head_dim);
    const Partial total(partials, shape.rows);
    for (int64_t i = 1; i < unit.num_splits(); ++i)
        merge(shape, total, Partial(partials + i * stride, shape.rows));
    finish(args, unit, shape, total);
}

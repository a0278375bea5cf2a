// The keys and values of one unit in one block of positions, as products read them: where they lie in
// their pages if they can be read there, else copied. Positions outside [begin, end) may be anybody's
// or nobody's: their keys may be read, for scores that are then thrown away, but never their values,
// since no weight makes nothing of a NaN.
//
// In latent pages both are the same rows, a token's after the other's, so that keys are always copied:
// one copy for all query heads.

template <class T>
constexpr bool kIsPaired = sizeof(T) == sizeof(bf16);
template <class T>
constexpr bool kInTiles = kTiles && kIsPaired<T>;
template <class T>
constexpr bool kDot = kBfloat16Pairs && kIsPaired<T>;  // whatever multiplies them
// Keys, dimensions and rows of queries that are read together.
template <class T>
constexpr int64_t kTogether = kInTiles<T> ? 16 : Vec::kWidth;

static inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// Sizes of a unit's matrices, in 32-bit elements.
template <class T>
struct Shape {
    int64_t rows, dim;   // dim: of queries and keys
    int64_t value_dim;
    int64_t steps;       // of Q K^T
    int64_t q_stride;    // a packed query
    int64_t padded_dim;  // columns of V and of the output, in whole vectors or tiles
    int64_t padded_rows;
    bool widen;  // keys and values become floats once for all rows

    Shape(int64_t tokens, const AttentionArgs& args)
        : rows(tokens * args.group), dim(args.head_dim), value_dim(args.value_dim) {
        steps = kIsPaired<T> ? (dim + 1) / 2 : dim;
        q_stride = round_up(kIsPaired<T> && !kDot<T> ? 2 * steps : steps, kTogether<T>);
        padded_dim = round_up(value_dim, kTogether<T>);
        padded_rows = kInTiles<T> ? round_up(rows, 16) : rows;
        widen = kIsPaired<T> && !kDot<T> && rows > kProductRows;
    }
    int64_t partial() const { return partial_floats(rows, value_dim); }
    int64_t copied_keys() const { return round_up(steps, kTogether<T>) * kKeyBlock; }
    int64_t copies() const { return copied_keys() + padded_dim * kKeyBlock; }
    // Of tiles: the values again, since rows that lie together need not do so tile by tile.
    int64_t widened() const {
        return widen ? (2 * steps + padded_dim) * kKeyBlock : kInTiles<T> ? padded_dim * kKeyBlock : 0;
    }
    int64_t for_rows() const {
        return round_up(padded_rows * (q_stride + kKeyBlock + Vec::kWidth + 2), 16);
    }
    int64_t work() const { return for_rows() + copies() + widened(); }
};

template <class T>
struct Block {
    int64_t base, begin, end;
    const float* k[kKeyBlock / kTogether<T>];  // each vector of keys, at the first step
    int64_t k_stride;                         // from step to step
    const float* v[kKeyBlock];                // each token's values, or each pair's

    // The vectors of keys, and the rows of values, that have a position in [begin, end).
    int64_t first_column() const { return (begin - base) / kTogether<T>; }
    int64_t end_column() const { return (end - base + kTogether<T> - 1) / kTogether<T>; }
    int64_t first_row() const { return kIsPaired<T> ? (begin - base) / 2 : begin - base; }
    int64_t end_row() const { return kIsPaired<T> ? (end - base + 1) / 2 : end - base; }

    Columns<kTogether<T>> keys() const { return {k, k_stride}; }
    Rows values() const { return {v}; }

    // The block with position `at`.
    void place(const AttentionUnit& unit, int64_t at) {
        base = at / kKeyBlock * kKeyBlock;
        begin = unit.first_key > base ? unit.first_key : base;
        end = unit.end_key < base + kKeyBlock ? unit.end_key : base + kKeyBlock;
    }
};

// Whether whole vectors of keys, or rows of values in whole vectors, lie together in a page.
template <class T>
static inline bool keys_lie_together(const AttentionArgs& args) {
    if (kInTiles<T> && args.head_dim % 32 != 0) return false;  // the last tile would go on past them
    return !args.latent && args.page_size % kTogether<T> == 0;
}
template <class T>
static inline bool values_lie_together(const AttentionArgs& args) {
    if (args.value_dim % kTogether<T> != 0) return false;
    return !kIsPaired<T> || (!args.latent && args.page_size % 2 == 0);
}

// `fn(position, count, offset, head)` for the positions of each page in [begin, end): `offset` is
// that of the first in its page, `head` that of the head's keys or values there, in bytes from page 0.
template <class Fn>
static inline void for_each_page(const AttentionArgs& args, const AttentionUnit& unit,
                                 int64_t begin, int64_t end, const Fn& fn) {
    int64_t page = begin / args.page_size, offset = begin % args.page_size;
    for (int64_t position = begin; position < end; ++page, offset = 0) {
        const int64_t left = args.page_size - offset;
        const int64_t count = left < end - position ? left : end - position;
        fn(position, count, offset,
           unit.pages[page] * args.page_bytes + unit.kv_head * args.head_bytes);
        position += count;
    }
}

// Points `block` at keys that lie together.
template <class T>
static void find_keys(const AttentionArgs& args, const AttentionUnit& unit, Block<T>& block) {
    constexpr int64_t kKeys = kTogether<T>;
    const int64_t begin = block.base + block.first_column() * kKeys;
    const int64_t end = block.base + block.end_column() * kKeys;
    block.k_stride = args.page_size;
    for_each_page(args, unit, begin, end, [&](int64_t at, int64_t count, int64_t offset, int64_t head) {
        const float* k = reinterpret_cast<const float*>(args.k_pages + head) + offset;
        for (int64_t i = 0; i < count; i += kKeys) block.k[(at - block.base + i) / kKeys] = k + i;
    });
}

// Keys to `packed[steps][kKeyBlock]`, from pages of any size.
template <class T>
static void copy_keys(const AttentionArgs& args, const AttentionUnit& unit, const Shape<T>& shape,
                      Block<T>& block, float* packed) {
    const int64_t size = args.page_size, steps = shape.steps;
    block.k_stride = kKeyBlock;
    constexpr int64_t kKeys = kTogether<T>;
    for (int i = 0; i < kKeyBlock / kKeys; ++i) block.k[i] = packed + i * kKeys;
    for (int64_t i = steps * kKeyBlock; i < shape.copied_keys(); ++i) packed[i] = 0;
    if (size > 1 && !args.latent) {
        for_each_page(args, unit, block.begin, block.end,
                      [&](int64_t at, int64_t count, int64_t offset, int64_t head) {
                          const float* k = reinterpret_cast<const float*>(args.k_pages + head) + offset;
                          float* to = packed + (at - block.base);
                          for (int64_t step = 0; step < steps; ++step)
                              for (int64_t i = 0; i < count; ++i)
                                  to[step * kKeyBlock + i] = k[step * size + i];
                      });
        return;
    }
    const float* rows[kKeyBlock];
    for (int i = 0; i < kKeyBlock; ++i) rows[i] = kZeros;
    for_each_page(args, unit, block.begin, block.end,
                  [&](int64_t at, int64_t count, int64_t offset, int64_t head) {
                      const float* k =
                          reinterpret_cast<const float*>(args.k_pages + head) + offset * steps;
                      for (int64_t i = 0; i < count; ++i) rows[at - block.base + i] = k + i * steps;
                  });
    const int64_t end = block.end_column() * kKeys;
    for (int64_t column = block.first_column() * kKeys; column < end; column += Vec::kWidth) {
        for (int64_t i = 0; i < steps; i += Vec::kWidth) {
            Vec square[Vec::kWidth];
            for (int j = 0; j < Vec::kWidth; ++j)
                square[j] = load_some(rows[column + j] + i, steps - i);
            Vec::transpose(square);
            for (int j = 0; j < Vec::kWidth && i + j < steps; ++j)
                square[j].store(packed + (i + j) * kKeyBlock + column);
        }
    }
}

// The values of two tokens as pairs; null for a token whose values must not be seen.
static inline void interleave_values(const bf16* first, const bf16* second, int64_t dim,
                                     uint32_t* to) {
    for (int64_t i = 0; i < dim; ++i)
        to[i] = (first ? first[i].bits : 0u) | (second ? uint32_t{second[i].bits} << 16 : 0u);
}

// As `Block::v`, where rows lie together; others in `copies[kKeyBlock][padded_dim]`, padded with
// zeros. Half a pair outside [begin, end) is zero.
template <class T>
static void find_values(const AttentionArgs& args, const AttentionUnit& unit, const Shape<T>& shape,
                        Block<T>& block, float* copies) {
    const int64_t size = args.page_size, dim = shape.value_dim, padded = shape.padded_dim;
    // From a token to the next, where each has a row of its own.
    const int64_t row_size = args.latent ? shape.steps * (kIsPaired<T> ? 2 : 1) : dim;
    const int64_t base = block.base;
    const bool together = values_lie_together<T>(args);
    if constexpr (!kIsPaired<T>) {
        for_each_page(args, unit, block.begin, block.end,
                      [&](int64_t at, int64_t count, int64_t offset, int64_t head) {
                          const float* v =
                              reinterpret_cast<const float*>(args.v_pages + head) + offset * row_size;
                          for (int64_t i = 0; i < count; ++i)
                              block.v[at - base + i] = v + i * row_size;
                      });
        if (together) return;
        for (int64_t row = block.first_row(); row < block.end_row(); ++row) {
            float* to = copies + row * padded;
            for (int64_t i = 0; i < dim; i += Vec::kWidth)
                load_some(block.v[row] + i, dim - i).store(to + i);
            block.v[row] = to;
        }
    } else {
        const bool in_pairs = size % 2 == 0 && !args.latent;
        const bf16* tokens[kKeyBlock];  // the values of each, where pages hold no pairs
        if (in_pairs) {
            for_each_page(args, unit, block.begin / 2 * 2, block.end,
                          [&](int64_t at, int64_t count, int64_t offset, int64_t head) {
                              const float* v = reinterpret_cast<const float*>(
                                  args.v_pages + head + 2 * offset * dim);
                              for (int64_t i = 0; 2 * i < count; ++i)
                                  block.v[(at - base) / 2 + i] = v + i * dim;
                          });
        } else {
            for (int i = 0; i < kKeyBlock; ++i) tokens[i] = nullptr;
            for_each_page(args, unit, block.begin, block.end,
                          [&](int64_t at, int64_t count, int64_t offset, int64_t head) {
                              const bf16* v = reinterpret_cast<const bf16*>(args.v_pages + head) +
                                              offset * row_size;
                              for (int64_t i = 0; i < count; ++i)
                                  tokens[at - base + i] = v + i * row_size;
                          });
        }
        const int64_t rows = block.end_row();
        for (int64_t row = block.first_row(); row < rows; ++row) {
            const uint32_t first = base + 2 * row >= block.begin ? 0xffffu : 0;
            const uint32_t second = base + 2 * row + 1 < block.end ? 0xffff0000u : 0;
            const uint32_t mask = first | second;
            if (together && mask == 0xffffffffu) continue;
            uint32_t* to = reinterpret_cast<uint32_t*>(copies + row * padded);
            if (in_pairs) {
                const uint32_t* from = reinterpret_cast<const uint32_t*>(block.v[row]);
                for (int64_t i = 0; i < dim; ++i) to[i] = from[i] & mask;
            } else {
                interleave_values(tokens[2 * row], tokens[2 * row + 1], dim, to);
            }
            for (int64_t i = dim; i < padded; ++i) to[i] = 0;
            block.v[row] = copies + row * padded;
        }
    }
}

// Points `ahead` at keys and values that are soon to be read, for their lines to be fetched; whoever
// reads them still finds them himself. Both must lie together.
template <class T>
static void point_at(const AttentionArgs& args, const AttentionUnit& unit, const Shape<T>& shape,
                     Block<T>& ahead) {
    for (const float*& k : ahead.k) k = kZeros;
    for (const float*& v : ahead.v) v = kZeros;
    find_keys(args, unit, ahead);
    const int64_t row_bytes = shape.dim * static_cast<int64_t>(sizeof(T));
    constexpr int64_t kTokens = kIsPaired<T> ? 2 : 1;
    for_each_page(args, unit, ahead.begin / kTokens * kTokens, ahead.end,
                  [&](int64_t at, int64_t count, int64_t offset, int64_t head) {
                      const char* v = args.v_pages + head + offset * row_bytes;
                      for (int64_t i = 0; i < count; i += kTokens)
                          ahead.v[(at - ahead.base + i) / kTokens] =
                              reinterpret_cast<const float*>(v + i * row_bytes);
                  });
}

// Keys and values as floats in `to`; afterwards `rows` of values are tokens.
template <class T>
static void widen(const Shape<T>& shape, const Block<T>& block, Block<T>& wide, float* to) {
    wide.k_stride = kKeyBlock;
    for (int64_t column = block.first_column(); column < block.end_column(); ++column) {
        float* k = to + column * Vec::kWidth;
        wide.k[column] = k;
        for (int64_t step = 0; step < shape.steps; ++step) {
            const Vec pair = Vec::load(block.k[column] + step * block.k_stride);
            pair.first_halves().store(k + 2 * step * kKeyBlock);
            pair.second_halves().store(k + (2 * step + 1) * kKeyBlock);
        }
    }
    float* values = to + 2 * shape.steps * kKeyBlock;
    for (int64_t row = block.first_row(); row < block.end_row(); ++row) {
        float* first = values + 2 * row * shape.padded_dim;
        float* second = first + shape.padded_dim;
        for (int64_t i = 0; i < shape.padded_dim; i += Vec::kWidth) {
            const Vec pair = Vec::load(block.v[row] + i);
            pair.first_halves().store(first + i);
            pair.second_halves().store(second + i);
        }
        wide.v[2 * row] = first;
        wide.v[2 * row + 1] = second;
    }
}

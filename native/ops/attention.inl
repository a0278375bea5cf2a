// Paged attention: softmax(Q K^T) V in one pass over the keys, after Dao et al., "FlashAttention",
// 2022 (the running maximum and sum of Milakov and Gimelshein, 2018), on pages as in Kwon et al.,
// "PagedAttention", 2023.
//
// A unit is the rows (tokens x grouped heads) that share the keys of one KV head, from a single
// decode to a whole block of a prefill. Per block of keys: a register holds one step of several
// keys, so each score is one chain of multiply-adds over the dimensions; scale, mask, exponentiate;
// then add P V, one chain over the keys. Every score and sum takes the same steps in the same order
// however many rows share the tile, which is what makes a decode and a prefill agree to the last bit.
//
// Scratch matrices hold 32-bit elements: a float, or with `kDot` a pair of bfloat16 along the
// summed dimension.

// As floats, or with `kDot` as they are; padded with zeros to whole vectors.
template <class T>
static void pack_queries(const AttentionArgs& args, const AttentionUnit& unit, const Shape<T>& shape,
                         float* q) {
    for (int64_t row = 0; row < shape.rows; ++row) {
        const int64_t token = row_of(unit, row / args.group);
        const int64_t head = unit.kv_head * args.group + row % args.group;
        const T* from = static_cast<const T*>(args.q) + token * args.q_token_stride +
                        head * args.q_head_stride;
        float* to = q + row * shape.q_stride;
        if constexpr (kDot<T>) {
            to[shape.steps - 1] = 0;
            __builtin_memcpy(to, from, shape.dim * sizeof(T));
            for (int64_t i = shape.steps; i < shape.q_stride; ++i) to[i] = 0;
            continue;
        }
        for (int64_t i = 0; i < shape.q_stride; i += Vec::kWidth) {
            if (i < shape.dim) {
                load_some(from + i, shape.dim - i).store(to + i);
            } else {
                Vec::zero().store(to + i);
            }
        }
    }
}

// Both products of a block. `ahead`: another block whose lines are fetched meanwhile, or `Nothing`.
template <Steps kSteps, class T, class Ahead>
static void attend_few(const AttentionArgs& args, const AttentionUnit& unit, const Shape<T>& shape,
                       const Block<T>& block, const Ahead& ahead, const Working<T>& at,
                       const Partial& partial) {
    const Product score{at.q, shape.q_stride, 0, shape.steps, at.scores, kKeyBlock, nullptr};
    const Product mix{at.scores,   kKeyBlock,        block.first_row(), block.end_row(),
                      partial.out, shape.padded_dim, at.factors};
    const int64_t vectors = shape.padded_dim / Vec::kWidth;
    const int64_t column = block.first_column(), columns = block.end_column();
    if constexpr (sizeof(Ahead) == sizeof(Block<T>)) {
        multiply_few<kSteps>(score, block.keys(), ahead.keys(), shape.rows, column, columns);
        weigh_rows(args, unit, block, 0, shape.rows, at.scores, at, partial);
        multiply_few<kSteps>(mix, block.values(), ahead.values(), shape.rows, 0, vectors);
    } else {
        multiply_few<kSteps>(score, block.keys(), ahead, shape.rows, column, columns);
        weigh_rows(args, unit, block, 0, shape.rows, at.scores, at, partial);
        multiply_few<kSteps>(mix, block.values(), ahead, shape.rows, 0, vectors);
    }
}

template <Steps kSteps, class T>
static void attend_many(const AttentionArgs& args, const AttentionUnit& unit, const Shape<T>& shape,
                        const Block<T>& block, const Working<T>& at, const Partial& partial) {
    int64_t steps = shape.steps, first = block.first_row(), end = block.end_row();
    if constexpr (kSteps == Steps::floats && kIsPaired<T>) {
        steps *= 2;
        first *= 2;
        end *= 2;
    }
    const Product score{at.q, shape.q_stride, 0, steps, at.scores, kKeyBlock, nullptr};
    const Product mix{at.scores, kKeyBlock, first, end, partial.out, shape.padded_dim, at.factors};
    multiply<kSteps>(score, block.keys(), shape.rows, block.first_column(), block.end_column());
    weigh_rows(args, unit, block, 0, shape.rows, at.scores, at, partial);
    multiply<kSteps>(mix, block.values(), shape.rows, 0, shape.padded_dim / Vec::kWidth);
}

// A block against all rows of the unit. A decode does so little with each key that it waits for memory:
// what it reads next, the block of `coming` with the position `after`, is fetched on the way.
template <class T>
static void attend_block(const AttentionArgs& args, const AttentionUnit& unit,
                         const AttentionUnit* coming, int64_t after, const Shape<T>& shape,
                         const Block<T>& block, Tiles& tiles, const Working<T>& at,
                         const Partial& partial) {
    constexpr Steps kSteps = kDot<T>         ? Steps::pairs
                             : kIsPaired<T> ? Steps::widened
                                            : Steps::floats;
    const bool few = shape.rows <= kProductRows;
    Block<T> ahead;
    const bool fetches =
        few && coming && keys_lie_together<T>(args) && values_lie_together<T>(args);
    if (fetches) {
        ahead.place(*coming, after);
        point_at(args, *coming, shape, ahead);
    }
    if constexpr (kInTiles<T>) {
        attend_in_tiles(args, unit, shape, block, fetches ? &ahead : nullptr, tiles, at, partial);
    } else if (fetches) {
        attend_few<kSteps>(args, unit, shape, block, ahead, at, partial);
    } else if (few) {
        attend_few<kSteps>(args, unit, shape, block, Nothing{}, at, partial);
    } else if constexpr (kSteps == Steps::widened) {
        Block<T> wide = block;
        widen(shape, block, wide, at.widened);
        attend_many<Steps::floats>(args, unit, shape, wide, at, partial);
    } else {
        attend_many<kSteps>(args, unit, shape, block, at, partial);
    }
}

// The keys of one split (counted over the whole sequence) against all rows of the unit; what follows
// may be the first block of the `next` unit.
template <class T>
static void attend(const AttentionArgs& args, const AttentionUnit& unit, const AttentionUnit* next,
                   int64_t split, const Shape<T>& shape, float* memory, float* work) {
    const int64_t rows = shape.rows;
    const Working<T> at(work, shape);
    const Partial partial(memory, rows);
    pack_queries(args, unit, shape, at.q);
    for (int64_t i = 0; i < rows; ++i) partial.maximum[i] = kMinusInfinity;
    for (int64_t i = 0; i < rows * Vec::kWidth; ++i) at.sums[i] = 0;
    for (int64_t i = 0; i < shape.padded_rows * shape.padded_dim; ++i) partial.out[i] = 0;

    Tiles tiles;
    if constexpr (kInTiles<T>) configure_tiles();
    const int64_t first = split * kSplitKeys, last = first + kSplitKeys;
    const int64_t end = unit.end_key < last ? unit.end_key : last;
    int64_t position = first > unit.first_key ? first : unit.first_key;
    while (position < end) {
        Block<T> block;
        block.place(unit, position);
        position = block.base + kKeyBlock;
        if (keys_lie_together<T>(args)) {
            find_keys(args, unit, block);
        } else {
            copy_keys(args, unit, shape, block, at.copies);
        }
        find_values(args, unit, shape, block, at.copies + shape.copied_keys());
        const bool more = position < unit.end_key;
        attend_block(args, unit, more ? &unit : next, more || !next ? position : next->first_key,
                     shape, block, tiles, at, partial);
    }
    if constexpr (kInTiles<T>) release_tiles();
    for (int64_t row = 0; row < rows; ++row)
        partial.sum[row] = Vec::load(at.sums + row * Vec::kWidth).sum();
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

// What the weighted values of a row are multiplied by at last. Its sink joins the sum of the weights
// here, once, when all splits are merged.
static float last_factor(const AttentionArgs& args, const Partial& total, int64_t row, int64_t head,
                         int64_t token) {
    float maximum = total.maximum[row], sum = total.sum[row], keep = 1;
    if (args.sinks) {
        const float sink = args.sinks[head] * kLog2e;
        const float before = maximum;
        if (sink > maximum) maximum = sink;
        const float reference = maximum == kMinusInfinity ? 0.0f : maximum;
        const Vec factor = exp2(Vec::set(before - reference));
        keep = factor.front();
        sum = Vec::fma(Vec::set(sum), factor, exp2(Vec::set(sink - reference))).front();
    }
    if (args.log_sum_exp) {
        const Vec units = Vec::set(kLn2);
        args.log_sum_exp[token * args.kv_heads * args.group + head] =
            Vec::fma(Vec::set(maximum), units, Vec::set(__builtin_logf(sum))).front();
    }
    return keep / sum;
}

template <class T>
static void finish(const AttentionArgs& args, const AttentionUnit& unit, const Shape<T>& shape,
                   const Partial& total) {
    for (int64_t row = 0; row < shape.rows; ++row) {
        const int64_t token = unit.first_row + row / args.group;
        const int64_t head = unit.kv_head * args.group + row % args.group;
        T* out = static_cast<T*>(args.out) +
                 (token * args.kv_heads * args.group + head) * shape.value_dim;
        const bool plain = !args.sinks && !args.log_sum_exp;
        const Vec scale = Vec::set(plain ? 1.0f / total.sum[row]
                                         : last_factor(args, total, row, head, token));
        for (int64_t i = 0; i < shape.value_dim; i += Vec::kWidth) {
            const Vec x = Vec::load(total.out + row * shape.padded_dim + i) * scale;
            store_some(x, out + i, shape.value_dim - i);
        }
    }
}

template <class T>
static void attention(const AttentionArgs& args, const AttentionUnit& unit,
                      const AttentionUnit* next) {
    const Shape<T> shape(unit.tokens, args);
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
static void attention_split(const AttentionArgs& args, const AttentionUnit& unit,
                            const AttentionUnit* next, const PartialPlaces& to) {
    const Shape<T> shape(unit.tokens, args);
    const int64_t split = unit.first_split();
    if (to.count == 1) {
        attend<T>(args, unit, next, split, shape, to.partials + to.places->slot * to.stride,
                  scratch(shape.work()));
        return;
    }
    float* memory = scratch(shape.partial() + shape.work());
    attend<T>(args, unit, next, split, shape, memory, memory + shape.partial());
    const Partial all(memory, shape.rows);
    int64_t first = 0;
    for (int64_t i = 0; i < to.count; ++i) {
        const int64_t rows = to.places[i].tokens * args.group;
        const Partial own(to.partials + to.places[i].slot * to.stride, rows);
        __builtin_memcpy(own.maximum, all.maximum + first, rows * sizeof(float));
        __builtin_memcpy(own.sum, all.sum + first, rows * sizeof(float));
        __builtin_memcpy(own.out, all.out + first * shape.padded_dim,
                         rows * shape.padded_dim * sizeof(float));
        first += rows;
    }
}

template <class T>
static void attention_merge(const AttentionArgs& args, const AttentionUnit& unit, float* partials,
                            int64_t stride) {
    const Shape<T> shape(unit.tokens, args);
    const Partial total(partials, shape.rows);
    for (int64_t i = 1; i < unit.num_splits(); ++i)
        merge(shape, total, Partial(partials + i * stride, shape.rows));
    finish(args, unit, shape, total);
}

template <class T>
static void merge_attention(const MergeAttentionArgs& args, int64_t begin, int64_t end) {
    const int64_t dim = args.head_dim;
    for (int64_t row = begin; row < end; ++row) {
        T* const out = static_cast<T*>(args.out) + row * dim;
        const T* const part = static_cast<const T*>(args.part) + row * dim;
        const float a = args.log_sum_exp[row], b = args.part_log_sum_exp[row];
        if (b == kMinusInfinity) {
            if (a == kMinusInfinity) __builtin_memset(out, 0, dim * sizeof(T));
            continue;
        }
        if (a == kMinusInfinity) {
            __builtin_memcpy(out, part, dim * sizeof(T));
            args.log_sum_exp[row] = b;
            continue;
        }
        const float maximum = b > a ? b : a;
        const Vec keep = exp_minus(Vec::set(maximum - a)), add = exp_minus(Vec::set(maximum - b));
        const Vec sum = keep + add;
        for (int64_t i = 0; i < dim; i += Vec::kWidth) {
            const int64_t left = dim - i;
            const Vec more = load_some(part + i, left) * add;
            store_some(Vec::fma(load_some(out + i, left), keep, more) / sum, out + i, left);
        }
        args.log_sum_exp[row] = maximum + __builtin_logf(sum.front());
    }
}

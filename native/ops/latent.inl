// What latent attention writes: of each token its normalised latent, and behind it the one rotated key
// that all heads share. The queries' last dimensions are turned in their place.

template <class T>
static void latent_write(const LatentArgs& args, int64_t begin, int64_t end) {
    constexpr int64_t kPerStep = 4 / sizeof(T);
    const int64_t dim = args.rank + args.rotated;
    const int64_t row_size = (dim + kPerStep - 1) / kPerStep * kPerStep;
    RotaryArgs turn{};
    turn.head_dim = args.rotated;
    turn.half = args.half;
    turn.interleaved = args.interleaved;
    for (int64_t token = begin; token < end; ++token) {
        const float* cos = args.cos + args.positions[token] * args.half;
        const float* sin = args.sin + args.positions[token] * args.half;
        T* query = static_cast<T*>(args.queries) + token * args.query_stride + args.rank;
        for (int64_t head = 0; head < args.q_heads; ++head, query += dim)
            rotate_head<T>(turn, query, query, nullptr, cos, sin, 1.0f);
        const T* latent = static_cast<const T*>(args.latents) + token * args.latent_stride;
        const int64_t page = args.locations[token] / args.page_size;
        const int64_t offset = args.locations[token] % args.page_size;
        T* row = reinterpret_cast<T*>(args.pages + page * args.page_bytes) + offset * row_size;
        rms_norm<T>({.x = latent,
                     .x_stride = dim,
                     .residual = nullptr,
                     .weight = args.norm,
                     .out = row,
                     .out_stride = dim,
                     .size = args.rank,
                     .eps = args.eps,
                     .weight_offset = args.weight_offset},
                    0, 1);
        rotate_head<T>(turn, latent + args.rank, row + args.rank, nullptr, cos, sin, 1.0f);
        if (!all_finite(row, args.rank)) {  // the value, of which the rest is no part
            fill(row, args.rank, 0.0f);
            fill(row + args.rank, args.rotated, __builtin_nanf(""));
        }
        if (dim < row_size) row[dim] = T{};
    }
}

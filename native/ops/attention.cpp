#include "ops/attention.h"

#include <stdexcept>
#include <vector>

#include "common/thread_pool.h"
#include "dispatch.h"

namespace aioserve::ops {
namespace {

const AttentionUnits& units_of(const Batch& batch, const KVPages& pages,
                               const AttentionCall& call) {
    return batch.units({.kv_heads = pages.heads,
                        .group = call.q_heads / pages.heads,
                        .window = call.window,
                        .logit_rows_only = call.logit_rows_only});
}

enum class Sharing { alone, units, splits };

// How threads share the work. Few units over long contexts: by splits, merged after.
Sharing sharing_of(const AttentionUnits& all, int64_t head_dim) {
    const int64_t threads = num_threads(), count = static_cast<int64_t>(all.units.size());
    if (threads == 1 || all.work * static_cast<double>(head_dim) < kParallelThreshold)
        return Sharing::alone;
    const bool split = count < 2 * threads && all.pieces.size() > all.units.size();
    return split ? Sharing::splits : Sharing::units;
}

// Floats of one piece's partial, the same for all.
int64_t stride_of(const AttentionUnits& all, int64_t head_dim) {
    return partial_floats(all.most_rows, head_dim);
}

}  // namespace

int64_t partials_of(const Batch& batch, const KVPages& pages, const AttentionCall& call) {
    const AttentionUnits& all = units_of(batch, pages, call);
    if (sharing_of(all, pages.head_dim) != Sharing::splits) return 0;
    return static_cast<int64_t>(all.pieces.size()) * stride_of(all, pages.head_dim);
}

void append_paged_attention(Phases& phases, const Batch& batch, const KVPages& pages, int64_t layer,
                            const AttentionCall& call, float* partials) {
    batch.check_pages(pages);
    if (!(call.scale > 0)) throw std::invalid_argument("scale must be above 0");
    const AttentionArgs args{.q = call.qkv,
                             .q_token_stride = call.row_stride,
                             .q_head_stride = pages.head_dim,
                             .out = call.out,
                             .k_pages = pages.plane(2 * layer),
                             .v_pages = pages.plane(2 * layer + 1),
                             .kv_heads = pages.heads,
                             .group = call.q_heads / pages.heads,
                             .head_dim = pages.head_dim,
                             .page_size = pages.page_size,
                             .scale = call.scale,
                             .soft_cap = call.soft_cap,
                             .window = call.window};
    const Kernels* const kernel = &kernels(pages.dtype);
    const AttentionUnits* const all = &units_of(batch, pages, call);
    const int64_t count = static_cast<int64_t>(all->units.size());
    // Units start in order, so that a thread's next is about as many on as there are threads.
    const auto attend = [args, kernel, all, count](int64_t i, int64_t stride) {
        const AttentionUnit* const units = all->units.data();
        kernel->attention(args, units[i], i + stride < count ? &units[i + stride] : nullptr);
    };
    switch (sharing_of(*all, args.head_dim)) {
        case Sharing::alone:
            phases.add(count > 0 ? 1 : 0, [attend, count](int64_t) {
                for (int64_t i = 0; i < count; ++i) attend(i, 1);
            });
            break;
        case Sharing::units:
            phases.add(count, [attend, stride = num_threads()](int64_t i) { attend(i, stride); });
            break;
        case Sharing::splits: {
            const int64_t stride = stride_of(*all, args.head_dim);
            phases.add(static_cast<int64_t>(all->pieces.size()), [=](int64_t i) {
                const AttentionPiece& piece = all->pieces[i];
                kernel->attention_split(args, all->units[piece.unit], piece.split,
                                        partials + i * stride);
            });
            phases.add(count, [=](int64_t i) {
                kernel->attention_merge(args, all->units[i],
                                        partials + all->first_piece[i] * stride, stride);
            });
            break;
        }
    }
}

void paged_attention(const Batch& batch, const KVPages& pages, int64_t layer,
                     const AttentionCall& call) {
    thread_local Phases phases;
    thread_local std::vector<float> partials;
    const int64_t floats = partials_of(batch, pages, call);
    if (static_cast<int64_t>(partials.size()) < floats) partials.resize(floats);
    phases.clear();
    append_paged_attention(phases, batch, pages, layer, call, partials.data());
    phases.run();
}

}  // namespace aioserve::ops

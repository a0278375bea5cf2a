#include "ops/attention.h"

#include <memory>
#include <vector>

#include "common/thread_pool.h"
#include "dispatch.h"

namespace aioserve::ops {
namespace {

// Few units over long contexts: the splits of a unit run on several threads and are merged after.
void run_splits(const AttentionArgs& args, const Kernels& kernel,
                const std::vector<AttentionUnit>& units) {
    struct Piece {
        int64_t unit, split;
        float* partial;
    };
    std::vector<Piece> pieces;
    std::vector<int64_t> offsets;
    int64_t floats = 0;
    for (const AttentionUnit& unit : units) {
        const int64_t size = kernel.partial_size(unit.tokens * args.group, args.head_dim);
        offsets.push_back(floats);
        floats += unit.num_splits() * size;
    }
    const std::unique_ptr<float[]> memory(new float[floats]);
    for (size_t i = 0; i < units.size(); ++i) {
        const int64_t size = kernel.partial_size(units[i].tokens * args.group, args.head_dim);
        for (int64_t split = 0; split < units[i].num_splits(); ++split)
            pieces.push_back(
                {static_cast<int64_t>(i), split, memory.get() + offsets[i] + split * size});
    }
    parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
        const Piece& piece = pieces[i];
        kernel.attention_split(args, units[piece.unit], piece.split, piece.partial);
    });
    for (size_t i = 0; i < units.size(); ++i)
        kernel.attention_merge(args, units[i], memory.get() + offsets[i]);
}

}  // namespace

void paged_attention(const Batch& batch, const KVPages& pages, int64_t layer,
                     const AttentionCall& call) {
    batch.check_pages(pages);
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
    const Kernels& kernel = kernels(pages.dtype);
    const AttentionUnits& all = batch.units({args.kv_heads, args.group, args.window});
    const std::vector<AttentionUnit>& units = all.units;
    const int64_t threads = num_threads();
    const int64_t count = static_cast<int64_t>(units.size());
    // Units start in order, so that a thread's next is about as many on as there are threads.
    const auto attend = [&](int64_t i, int64_t stride) {
        kernel.attention(args, units[i], i + stride < count ? &units[i + stride] : nullptr);
    };
    if (threads == 1 || all.work * static_cast<double>(args.head_dim) < kParallelThreshold) {
        for (int64_t i = 0; i < count; ++i) attend(i, 1);
        return;
    }
    if (count < 2 * threads && all.most_splits > 1) return run_splits(args, kernel, units);
    parallel_for(count, [&](int64_t i) { attend(i, threads); });
}

}  // namespace aioserve::ops

#include "ops/attention.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "common/thread_pool.h"
#include "dispatch.h"

namespace aioserve::ops {
namespace {

const AttentionPlan& plan_of(const Batch& batch, const KVPages& pages, int64_t layer,
                             const AttentionCall& call) {
    return batch.attention({.kv_group = pages.places[layer].group,
                            .kv_heads = pages.heads,
                            .group = call.q_heads / pages.heads,
                            .head_dim = pages.head_dim,
                            .window = call.window,
                            .logit_rows_only = call.logit_rows_only,
                            .threads = num_threads()});
}

}  // namespace

int64_t partials_of(const Batch& batch, const KVPages& pages, int64_t layer,
                    const AttentionCall& call) {
    const AttentionPlan& plan = plan_of(batch, pages, layer, call);
    return plan.num_slots * partial_floats(plan.most_rows, pages.value_dim());
}

void append_paged_attention(Phases& phases, const Batch& batch, const KVPages& pages, int64_t layer,
                            const AttentionCall& call, float* partials) {
    batch.check_pages(pages);
    if (!(call.scale > 0)) throw std::invalid_argument("scale must be above 0");
    const int64_t kept = pages.windows[pages.places[layer].group];
    if (kept && (!call.window || call.window > kept))
        throw std::invalid_argument("window must be from 1 to the " + std::to_string(kept) +
                                    " positions that the pages of layer " + std::to_string(layer) +
                                    " keep, got " + std::to_string(call.window));
    const AttentionArgs args{.q = call.qkv,
                             .q_token_stride = call.row_stride,
                             .q_head_stride = pages.head_dim,
                             .out = call.out,
                             .k_pages = pages.keys(layer),
                             .v_pages = pages.values(layer),
                             .page_bytes = pages.page_bytes(),
                             .head_bytes = pages.head_bytes(),
                             .latent = pages.rank > 0,
                             .kv_heads = pages.heads,
                             .group = call.q_heads / pages.heads,
                             .head_dim = pages.head_dim,
                             .value_dim = pages.value_dim(),
                             .page_size = pages.page_size,
                             .scale = call.scale,
                             .soft_cap = call.soft_cap,
                             .window = call.window,
                             .sinks = call.sinks,
                             .log_sum_exp = call.log_sum_exp};
    const Kernels* const kernel = &kernels(pages.dtype);
    const AttentionPlan* const plan = &plan_of(batch, pages, layer, call);
    const int64_t count = static_cast<int64_t>(plan->tasks.size());
    const int64_t merges = static_cast<int64_t>(plan->merges.size());
    const int64_t stride = partial_floats(plan->most_rows, args.value_dim);
    // Tasks start in order, so that a thread's next is about as many on as there are threads.
    const auto attend = [=](int64_t i, int64_t ahead) {
        const AttentionTask& task = plan->tasks[i];
        const AttentionUnit* next = i + ahead < count ? &plan->tasks[i + ahead].unit : nullptr;
        if (task.num_places == 0) {
            kernel->attention(args, task.unit, next);
        } else {
            kernel->attention_split(args, task.unit, next,
                                    {.places = plan->places.data() + task.first_place,
                                     .count = task.num_places,
                                     .partials = partials,
                                     .stride = stride});
        }
    };
    const auto merge = [=](int64_t i) {
        const AttentionMerge& unit = plan->merges[i];
        kernel->attention_merge(args, unit.unit, partials + unit.first_slot * stride, stride);
    };
    if (plan->alone) {
        phases.add(count > 0 ? 1 : 0, [=](int64_t) {
            for (int64_t i = 0; i < count; ++i) attend(i, 1);
            for (int64_t i = 0; i < merges; ++i) merge(i);
        });
        return;
    }
    phases.add(count, [attend, threads = num_threads()](int64_t i) { attend(i, threads); });
    if (merges > 0) phases.add(merges, merge);
}

void paged_attention(const Batch& batch, const KVPages& pages, int64_t layer,
                     const AttentionCall& call) {
    thread_local Phases phases;
    thread_local std::vector<float> partials;
    const int64_t floats = partials_of(batch, pages, layer, call);
    if (static_cast<int64_t>(partials.size()) < floats) partials.resize(floats);
    phases.clear();
    append_paged_attention(phases, batch, pages, layer, call, partials.data());
    phases.run();
}

void append_merge_attention(Phases& phases, const MergeAttentionArgs& args, DType dtype,
                            int64_t rows) {
    constexpr double kMerge = 0.2;  // nanoseconds per element on one thread, roughly
    const auto kernel = kernels(dtype).merge_attention;
    phases.add_ranges(rows, kMerge * static_cast<double>(rows * args.head_dim),
                      [=](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace aioserve::ops

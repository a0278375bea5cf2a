#include "ops/attention.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/thread_pool.h"
#include "ops/dispatch.h"

namespace aioserve::ops {
namespace {

[[noreturn]] void refuse(int64_t sequence, const std::string& problem) {
    throw std::invalid_argument("batch: sequence " + std::to_string(sequence) + " " + problem);
}

void check_sequence(const AttentionRequest& request, int64_t sequence, int64_t first_key) {
    const int64_t tokens = request.query_start[sequence + 1] - request.query_start[sequence];
    const int64_t context = request.context_lens[sequence];
    const int64_t page_size = request.args.page_size;
    if (tokens > context)
        refuse(sequence, "has " + std::to_string(tokens) + " query tokens in a context of " +
                             std::to_string(context));
    if (context > request.table_width * page_size)
        refuse(sequence, "has a context of " + std::to_string(context) + ", but its page table ends at " +
                             std::to_string(request.table_width * page_size));
    const int32_t* pages = request.page_table + sequence * request.table_width;
    for (int64_t i = first_key / page_size; i * page_size < context; ++i)
        if (static_cast<uint32_t>(pages[i]) >= static_cast<uint64_t>(request.num_pages))
            refuse(sequence, "names page " + std::to_string(pages[i]) + " of " +
                                 std::to_string(request.num_pages));
}

std::vector<AttentionUnit> split_into_units(const AttentionRequest& request) {
    const AttentionArgs& args = request.args;
    const int64_t per_unit = std::max<int64_t>(1, kRowBlock / args.group);
    std::vector<AttentionUnit> units;
    units.reserve(request.num_sequences * args.kv_heads);
    if (request.query_start[0] != 0 ||
        request.query_start[request.num_sequences] != request.num_tokens)
        throw std::invalid_argument("batch: query_start must run from 0 to the number of tokens, " +
                                    std::to_string(request.num_tokens));
    for (int64_t sequence = 0; sequence < request.num_sequences; ++sequence) {
        const int64_t start = request.query_start[sequence];
        const int64_t tokens = request.query_start[sequence + 1] - start;
        if (tokens < 0) refuse(sequence, "has a negative number of query tokens");
        if (tokens == 0) continue;
        const int64_t position = request.context_lens[sequence] - tokens;
        const auto first_key = [&](int64_t token) {
            return args.window ? std::max<int64_t>(0, position + token - args.window + 1) : 0;
        };
        check_sequence(request, sequence, std::max<int64_t>(0, first_key(0)));
        for (int64_t token = 0; token < tokens; token += per_unit) {
            const int64_t count = std::min(per_unit, tokens - token);
            for (int64_t head = 0; head < args.kv_heads; ++head) {
                units.push_back({.pages = request.page_table + sequence * request.table_width,
                                 .first_token = start + token,
                                 .position = position + token,
                                 .tokens = static_cast<int32_t>(count),
                                 .kv_head = static_cast<int32_t>(head),
                                 .first_key = first_key(token),
                                 .end_key = position + token + count});
            }
        }
    }
    return units;
}

// Roughly the nanoseconds of one thread: reading and transposing keys, then products.
double work_of(const AttentionArgs& args, const AttentionUnit& unit) {
    const double keys = static_cast<double>(unit.end_key - unit.first_key);
    return keys * args.head_dim * (0.15 + 0.02 * unit.tokens * args.group);
}

// Few units over long contexts: the splits of a unit run on several threads and are merged after.
void run_splits(const AttentionRequest& request, const std::vector<AttentionUnit>& units) {
    const Kernels& kernel = kernels(request.dtype);
    struct Piece {
        int64_t unit, split;
        float* partial;
    };
    std::vector<Piece> pieces;
    std::vector<int64_t> offsets;
    int64_t floats = 0;
    for (const AttentionUnit& unit : units) {
        const int64_t size =
            kernel.partial_size(unit.tokens * request.args.group, request.args.head_dim);
        offsets.push_back(floats);
        floats += unit.num_splits() * size;
    }
    const std::unique_ptr<float[]> memory(new float[floats]);
    for (size_t i = 0; i < units.size(); ++i) {
        const int64_t size =
            kernel.partial_size(units[i].tokens * request.args.group, request.args.head_dim);
        for (int64_t split = 0; split < units[i].num_splits(); ++split)
            pieces.push_back(
                {static_cast<int64_t>(i), split, memory.get() + offsets[i] + split * size});
    }
    parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
        const Piece& piece = pieces[i];
        kernel.attention_split(request.args, units[piece.unit], piece.split, piece.partial);
    });
    for (size_t i = 0; i < units.size(); ++i)
        kernel.attention_merge(request.args, units[i], memory.get() + offsets[i]);
}

}  // namespace

void paged_attention(const AttentionRequest& request) {
    std::vector<AttentionUnit> units = split_into_units(request);
    const Kernels& kernel = kernels(request.dtype);
    double work = 0;
    int64_t splits = 0;
    for (const AttentionUnit& unit : units) {
        work += work_of(request.args, unit);
        splits = std::max(splits, unit.num_splits());
    }
    const int64_t threads = num_threads();
    const int64_t count = static_cast<int64_t>(units.size());
    // Units start in order, so that a thread's next is about as many on as there are threads.
    const auto attend = [&](int64_t i, int64_t stride) {
        kernel.attention(request.args, units[i], i + stride < count ? &units[i + stride] : nullptr);
    };
    if (threads == 1 || work < kParallelThreshold) {
        for (int64_t i = 0; i < count; ++i) attend(i, 1);
        return;
    }
    if (count < 2 * threads && splits > 1) return run_splits(request, units);
    // The longest first, so that no thread is left alone with one at the end.
    std::stable_sort(units.begin(), units.end(),
                     [](const AttentionUnit& a, const AttentionUnit& b) {
                         return (a.end_key - a.first_key) * a.tokens >
                                (b.end_key - b.first_key) * b.tokens;
                     });
    parallel_for(count, [&](int64_t i) { attend(i, threads); });
}

}  // namespace aioserve::ops

// How the attention of a batch becomes tasks for threads: units that run whole, units that run split by
// split, and splits that several units read in the same pages, once for all of them.

#pragma once

#include <compare>
#include <vector>

#include "ops/types.h"

namespace aioserve::ops {

// What of a layer, and of the threads, decides how its attention is cut.
struct AttentionShape {
    int64_t kv_group;  // whose page table it reads
    int64_t kv_heads, group, head_dim, window;
    bool logit_rows_only;
    int64_t threads;
    auto operator<=>(const AttentionShape&) const = default;
};

struct AttentionTask {
    AttentionUnit unit;
    // Where partials go, of one split that all rows of the unit attend; none: the unit is whole.
    int64_t first_place, num_places;
};

// A unit that ran split by split.
struct AttentionMerge {
    AttentionUnit unit;
    int64_t first_slot;  // of its partials, a slot for each split
};

struct AttentionPlan {
    std::vector<AttentionTask> tasks;  // the longest first
    std::vector<AttentionMerge> merges;  // once the tasks have ended
    std::vector<PartialPlace> places;
    std::vector<int64_t> rows;  // that units of shared splits refer to
    int64_t num_slots = 0;
    int64_t most_rows = 0;  // tokens x group of a unit that has slots
    bool alone = true;  // too little work for a second thread

    // Tasks that read a split once for several units.
    int64_t num_shared() const;
};

// `units` are those of one KV head after the other's, for each run of tokens.
AttentionPlan plan_attention(const AttentionShape& shape, const std::vector<AttentionUnit>& units,
                             int64_t page_size);

}  // namespace aioserve::ops

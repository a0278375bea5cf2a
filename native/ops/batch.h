// Where the tokens of one step sit in their sequences and in the KV pages: made and checked once a
// step, for all of its layers.

#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "ops/attention_plan.h"
#include "ops/kv_pages.h"

namespace aioserve::ops {

// In somebody else's memory, which outlives the batch.
struct BatchArrays {
    const int32_t* query_start;   // [num_sequences + 1]
    const int32_t* context_lens;  // [num_sequences]
    const int32_t* page_table;    // [num_groups, num_sequences, table_width]
    const int64_t* token_locations;   // [num_groups, num_tokens]
    const int32_t* positions;     // [num_tokens]
    const int64_t* logit_rows;    // [num_logit_rows], of the tokens
    int64_t num_groups, num_sequences, table_width, num_tokens, num_logit_rows;
};

class Batch {
  public:
    // Throws std::invalid_argument where the arrays contradict each other or name a page or a slot
    // that `pages` doesn't have. Entries before the window of a group may be anything.
    Batch(const BatchArrays& arrays, const KVPages& pages);

    int64_t num_tokens() const { return arrays_.num_tokens; }
    const int64_t* logit_rows() const { return arrays_.logit_rows; }
    int64_t num_logit_rows() const { return arrays_.num_logit_rows; }
    const int32_t* positions() const { return arrays_.positions; }
    const int64_t* token_locations(int64_t group) const {
        return arrays_.token_locations + group * arrays_.num_tokens;
    }
    int64_t end_position() const { return end_position_; }  // above every position

    // Throws std::invalid_argument unless `pages` have the sizes that the batch was checked for.
    void check_pages(const KVPages& pages) const;

    // Made when a layer of this shape first asks; valid as long as the batch. Safe from any thread.
    const AttentionPlan& attention(const AttentionShape& shape) const;

  private:
    void check_sequence(int64_t sequence) const;
    void check_table(int64_t group, int64_t sequence) const;
    void check_locations(int64_t group) const;
    const int32_t* table(int64_t group, int64_t sequence) const {
        return arrays_.page_table +
               (group * arrays_.num_sequences + sequence) * arrays_.table_width;
    }
    std::vector<AttentionUnit> units(const AttentionShape& shape) const;
    void add_units(const AttentionShape& shape, int64_t sequence, const int64_t* rows,
                   int64_t first_row, int64_t index, int64_t tokens,
                   std::vector<AttentionUnit>& to) const;

    BatchArrays arrays_;
    int64_t num_pages_;
    int64_t page_size_;
    std::vector<int64_t> windows_;  // of the groups
    int64_t end_position_ = 0;
    mutable std::mutex mutex_;
    mutable std::map<AttentionShape, AttentionPlan> plans_;
};

}  // namespace aioserve::ops

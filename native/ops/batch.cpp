#include "ops/batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace aioserve::ops {
namespace {

[[noreturn]] void refuse(const std::string& problem) {
    throw std::invalid_argument("batch: " + problem);
}

}  // namespace

Batch::Batch(const BatchArrays& arrays, const KVPages& pages)
    : arrays_(arrays),
      num_pages_(pages.num_pages),
      page_size_(pages.page_size),
      windows_(pages.windows) {
    if (arrays.num_groups != pages.groups())
        refuse("has page tables of " + std::to_string(arrays.num_groups) + " groups, and the pages are of " +
               std::to_string(pages.groups()));
    const int32_t* starts = arrays.query_start;
    if (starts[0] != 0 || starts[arrays.num_sequences] != arrays.num_tokens)
        refuse("query_start must run from 0 to the number of tokens, " +
               std::to_string(arrays.num_tokens));
    for (int64_t i = 0; i < arrays.num_sequences; ++i) check_sequence(i);
    for (int64_t group = 0; group < arrays.num_groups; ++group) check_locations(group);
    for (int64_t i = 0; i < arrays.num_tokens; ++i) {
        if (arrays.positions[i] < 0)
            refuse("positions[" + std::to_string(i) + "] is " +
                   std::to_string(arrays.positions[i]));
        end_position_ = std::max<int64_t>(end_position_, arrays.positions[i] + int64_t{1});
    }
    for (int64_t i = 0; i < arrays.num_logit_rows; ++i)
        if (arrays.logit_rows[i] < 0 || arrays.logit_rows[i] >= arrays.num_tokens)
            refuse("logit_rows[" + std::to_string(i) + "] is " +
                   std::to_string(arrays.logit_rows[i]) + " of " +
                   std::to_string(arrays.num_tokens) + " tokens");
}

void Batch::check_sequence(int64_t sequence) const {
    const std::string name = "sequence " + std::to_string(sequence) + " ";
    const int64_t tokens = arrays_.query_start[sequence + 1] - arrays_.query_start[sequence];
    const int64_t context = arrays_.context_lens[sequence];
    if (tokens < 0) refuse(name + "has a negative number of query tokens");
    if (tokens > context)
        refuse(name + "has " + std::to_string(tokens) + " query tokens in a context of " +
               std::to_string(context));
    const int64_t end = arrays_.table_width * page_size_;
    if (context > end)
        refuse(name + "has a context of " + std::to_string(context) +
               ", but its page table ends at " + std::to_string(end));
    for (int64_t group = 0; group < arrays_.num_groups; ++group) check_table(group, sequence);
}

// From the page of the first position that a token of the step sees on.
void Batch::check_table(int64_t group, int64_t sequence) const {
    const int64_t tokens = arrays_.query_start[sequence + 1] - arrays_.query_start[sequence];
    const int64_t context = arrays_.context_lens[sequence], window = windows_[group];
    const int64_t first = window ? std::max<int64_t>(0, context - tokens - window + 1) : 0;
    const int32_t* pages = table(group, sequence);
    for (int64_t i = first / page_size_; i * page_size_ < context; ++i)
        if (static_cast<uint32_t>(pages[i]) >= static_cast<uint64_t>(num_pages_))
            refuse("sequence " + std::to_string(sequence) + " names page " +
                   std::to_string(pages[i]) + " of " + std::to_string(num_pages_));
}

void Batch::check_locations(int64_t group) const {
    const int64_t num_locations = num_pages_ * page_size_;
    const int64_t* locations = token_locations(group);
    for (int64_t i = 0; i < arrays_.num_tokens; ++i)
        if (locations[i] < 0 || locations[i] >= num_locations)
            refuse("token_locations[" + std::to_string(group) + ", " + std::to_string(i) + "] is " +
                   std::to_string(locations[i]) + ", outside the " +
                   std::to_string(num_locations) + " locations of the pages");
}

void Batch::check_pages(const KVPages& pages) const {
    if (pages.num_pages != num_pages_ || pages.page_size != page_size_)
        refuse("was prepared for " + std::to_string(num_pages_) + " pages of " +
               std::to_string(page_size_) + " tokens, got " + std::to_string(pages.num_pages) +
               " of " + std::to_string(pages.page_size));
    if (pages.windows != windows_) refuse("was prepared for pages of other groups");
}

const AttentionPlan& Batch::attention(const AttentionShape& shape) const {
    std::lock_guard lock(mutex_);
    const auto found = plans_.find(shape);
    if (found != plans_.end()) return found->second;
    return plans_.emplace(shape, plan_attention(shape, units(shape), page_size_)).first->second;
}

// `tokens` of a sequence, in order: `rows` of the batch (null: those from `first_row` on), the first
// of which has this index. `first_row` is that of the output.
void Batch::add_units(const AttentionShape& shape, int64_t sequence, const int64_t* rows,
                      int64_t first_row, int64_t index, int64_t tokens,
                      std::vector<AttentionUnit>& to) const {
    const int64_t per_unit = std::max<int64_t>(1, kRowBlock / shape.group);
    for (int64_t token = 0; token < tokens; token += per_unit) {
        const int64_t count = std::min(per_unit, tokens - token), last = token + count - 1;
        const int64_t begin = index + (rows ? rows[token] - rows[0] : token);
        const int64_t end = index + (rows ? rows[last] - rows[0] : last) + 1;
        for (int64_t head = 0; head < shape.kv_heads; ++head) {
            to.push_back({.pages = table(shape.kv_group, sequence),
                          .rows = rows ? rows + token : nullptr,
                          .first_row = first_row + token,
                          .index = begin,
                          .tokens = static_cast<int32_t>(count),
                          .kv_head = static_cast<int32_t>(head),
                          .first_key = shape.window ? std::max<int64_t>(0, begin - shape.window + 1) : 0,
                          .end_key = end});
        }
    }
}

std::vector<AttentionUnit> Batch::units(const AttentionShape& shape) const {
    const int32_t* starts = arrays_.query_start;
    const auto index_of = [&](int64_t sequence) {
        return arrays_.context_lens[sequence] - (starts[sequence + 1] - starts[sequence]);
    };
    std::vector<AttentionUnit> result;
    result.reserve(arrays_.num_sequences * shape.kv_heads);
    if (shape.logit_rows_only) {
        const int64_t* rows = arrays_.logit_rows;
        for (int64_t i = 0, end; i < arrays_.num_logit_rows; i = end) {
            const int64_t sequence =
                std::upper_bound(starts, starts + arrays_.num_sequences + 1, rows[i]) - starts - 1;
            for (end = i + 1; end < arrays_.num_logit_rows; ++end)
                if (rows[end] < rows[end - 1] || rows[end] >= starts[sequence + 1]) break;
            add_units(shape, sequence, rows + i, i, index_of(sequence) + rows[i] - starts[sequence],
                      end - i, result);
        }
    } else {
        for (int64_t sequence = 0; sequence < arrays_.num_sequences; ++sequence)
            add_units(shape, sequence, nullptr, starts[sequence], index_of(sequence),
                      starts[sequence + 1] - starts[sequence], result);
    }
    return result;
}

}  // namespace aioserve::ops

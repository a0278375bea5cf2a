#include "ops/batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace aioserve::ops {
namespace {

[[noreturn]] void refuse(const std::string& problem) {
    throw std::invalid_argument("batch: " + problem);
}

// Reading and transposing keys, then products.
double work_of(const AttentionUnit& unit, int64_t group) {
    return static_cast<double>(unit.end_key - unit.first_key) * (0.15 + 0.02 * unit.tokens * group);
}

}  // namespace

Batch::Batch(const BatchArrays& arrays, const KVPages& pages)
    : arrays_(arrays), num_pages_(pages.num_pages), page_size_(pages.page_size) {
    const int32_t* starts = arrays.query_start;
    if (starts[0] != 0 || starts[arrays.num_sequences] != arrays.num_tokens)
        refuse("query_start must run from 0 to the number of tokens, " +
               std::to_string(arrays.num_tokens));
    for (int64_t i = 0; i < arrays.num_sequences; ++i) check_sequence(i);
    const int64_t num_locations = num_pages_ * page_size_;
    for (int64_t i = 0; i < arrays.num_tokens; ++i) {
        if (arrays.token_locations[i] < 0 || arrays.token_locations[i] >= num_locations)
            refuse("token_locations[" + std::to_string(i) + "] is " +
                   std::to_string(arrays.token_locations[i]) + ", outside the " +
                   std::to_string(num_locations) + " locations of the pages");
        if (arrays.positions[i] < 0)
            refuse("positions[" + std::to_string(i) + "] is " +
                   std::to_string(arrays.positions[i]));
        end_position_ = std::max<int64_t>(end_position_, arrays.positions[i] + int64_t{1});
    }
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
    const int32_t* pages = arrays_.page_table + sequence * arrays_.table_width;
    for (int64_t i = 0; i * page_size_ < context; ++i)
        if (static_cast<uint32_t>(pages[i]) >= static_cast<uint64_t>(num_pages_))
            refuse(name + "names page " + std::to_string(pages[i]) + " of " +
                   std::to_string(num_pages_));
}

void Batch::check_pages(const KVPages& pages) const {
    if (pages.num_pages != num_pages_ || pages.page_size != page_size_)
        refuse("was prepared for " + std::to_string(num_pages_) + " pages of " +
               std::to_string(page_size_) + " tokens, got " + std::to_string(pages.num_pages) +
               " of " + std::to_string(pages.page_size));
}

const AttentionUnits& Batch::units(const AttentionShape& shape) const {
    std::lock_guard lock(mutex_);
    const auto found = units_.find(shape);
    return found != units_.end() ? found->second : units_.emplace(shape, split(shape)).first->second;
}

AttentionUnits Batch::split(const AttentionShape& shape) const {
    const int64_t per_unit = std::max<int64_t>(1, kRowBlock / shape.group);
    AttentionUnits result;
    result.units.reserve(arrays_.num_sequences * shape.kv_heads);
    for (int64_t sequence = 0; sequence < arrays_.num_sequences; ++sequence) {
        const int64_t start = arrays_.query_start[sequence];
        const int64_t tokens = arrays_.query_start[sequence + 1] - start;
        const int64_t position = arrays_.context_lens[sequence] - tokens;
        for (int64_t token = 0; token < tokens; token += per_unit) {
            const int64_t count = std::min(per_unit, tokens - token);
            const int64_t oldest = position + token - shape.window + 1;
            for (int64_t head = 0; head < shape.kv_heads; ++head) {
                const AttentionUnit unit{
                    .pages = arrays_.page_table + sequence * arrays_.table_width,
                    .first_token = start + token,
                    .position = position + token,
                    .tokens = static_cast<int32_t>(count),
                    .kv_head = static_cast<int32_t>(head),
                    .first_key = shape.window ? std::max<int64_t>(0, oldest) : 0,
                    .end_key = position + token + count};
                result.units.push_back(unit);
                result.work += work_of(unit, shape.group);
                result.most_splits = std::max(result.most_splits, unit.num_splits());
            }
        }
    }
    // So that no thread is left alone with a long one at the end.
    std::stable_sort(result.units.begin(), result.units.end(),
                     [](const AttentionUnit& a, const AttentionUnit& b) {
                         return (a.end_key - a.first_key) * a.tokens >
                                (b.end_key - b.first_key) * b.tokens;
                     });
    return result;
}

}  // namespace aioserve::ops

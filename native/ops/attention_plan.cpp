#include "ops/attention_plan.h"

#include <algorithm>
#include <cstring>

#include "common/thread_pool.h"

namespace aioserve::ops {
namespace {

// Nanoseconds of one thread per dimension of a head, roughly: reading keys and values, then products.
double work_of(const AttentionUnit& unit, int64_t group) {
    return static_cast<double>(unit.end_key - unit.first_key) * (0.15 + 0.02 * unit.tokens * group);
}

AttentionUnit piece_of(AttentionUnit unit, int64_t split) {
    unit.first_key = std::max<int64_t>(unit.first_key, split * kSplitKeys);
    unit.end_key = std::min<int64_t>(unit.end_key, (split + 1) * kSplitKeys);
    return unit;
}

int64_t first_row(const AttentionUnit& unit) { return unit.rows ? unit.rows[0] : unit.first_row; }

// A run of tokens (all of its units, one of each KV head) that attends a split as a whole.
struct Reader {
    int64_t run, split;
};

// Readers [begin, end) read the same pages.
struct Together {
    int64_t begin, end;
};

// Which runs of tokens read the keys of a split in the same pages. A page table may differ from another
// before the split and after it: keys and values of the split are all that its partials depend on.
class SharedSplits {
  public:
    SharedSplits(const AttentionShape& shape, const std::vector<AttentionUnit>& units,
                 int64_t page_size)
        : shape_(shape), units_(units), pages_per_split_(kSplitKeys / page_size) {
        if (shape.window > 0 || kSplitKeys % page_size != 0) return;
        const int64_t runs = static_cast<int64_t>(units.size()) / shape.kv_heads;
        for (int64_t run = 0; run < runs; ++run) {
            if (rows_of(run) > kRowBlock / 2) continue;
            for (int64_t split = 0; (split + 1) * kSplitKeys <= unit(run).index; ++split)
                readers_.push_back({run, split});
        }
        // By row at last, so that `index_of` takes no token for one before the first.
        std::sort(readers_.begin(), readers_.end(), [this](const Reader& a, const Reader& b) {
            if (a.split != b.split) return a.split < b.split;
            const int order = compare_pages(a, b);
            if (order != 0) return order < 0;
            const int64_t left = first_row(unit(a.run)), right = first_row(unit(b.run));
            return left != right ? left < right : a.run < b.run;
        });
        gather();
    }

    const std::vector<Together>& groups() const { return groups_; }
    const Reader& reader(int64_t index) const { return readers_[index]; }

  private:
    const AttentionUnit& unit(int64_t run) const { return units_[run * shape_.kv_heads]; }
    int64_t rows_of(int64_t run) const { return unit(run).tokens * shape_.group; }

    int compare_pages(const Reader& a, const Reader& b) const {
        const int32_t* left = unit(a.run).pages + a.split * pages_per_split_;
        const int32_t* right = unit(b.run).pages + b.split * pages_per_split_;
        return left == right ? 0 : std::memcmp(left, right, pages_per_split_ * sizeof(int32_t));
    }

    // Groups of as many rows as a block has, or of fewer where threads would have nothing to do.
    void gather() {
        std::vector<Together> alike;
        int64_t all_rows = 0;
        const int64_t count = static_cast<int64_t>(readers_.size());
        for (int64_t begin = 0, end; begin < count; begin = end) {
            int64_t rows = 0;
            for (end = begin; end < count && same(begin, end); ++end)
                rows += rows_of(readers_[end].run);
            if (end - begin == 1) continue;
            alike.push_back({begin, end});
            all_rows += rows * shape_.kv_heads;
        }
        const int64_t enough = std::min<int64_t>(kRowBlock, all_rows / shape_.threads);
        for (const Together& all : alike) {
            for (int64_t begin = all.begin, end; begin < all.end; begin = end) {
                int64_t rows = 0;
                for (end = begin; end < all.end; ++end) {
                    const int64_t more = rows_of(readers_[end].run);
                    if (rows + more > (end - begin < 2 ? kRowBlock : enough)) break;
                    rows += more;
                }
                if (end - begin > 1) groups_.push_back({begin, end});
            }
        }
    }
    bool same(int64_t a, int64_t b) const {
        return readers_[a].split == readers_[b].split && compare_pages(readers_[a], readers_[b]) == 0;
    }

    const AttentionShape& shape_;
    const std::vector<AttentionUnit>& units_;
    const int64_t pages_per_split_;
    std::vector<Reader> readers_;  // those of the same pages together
    std::vector<Together> groups_;
};

class Planner {
  public:
    Planner(const AttentionShape& shape, const std::vector<AttentionUnit>& units, int64_t page_size)
        : shape_(shape), units_(units), shared_(shape, units, page_size), first_slot_(units.size(), -1) {
        give_slots();
        for (const Together& group : shared_.groups()) add_shared(group);
        for (size_t i = 0; i < units_.size(); ++i) add_rest(units_[i], first_slot_[i]);
        std::stable_sort(plan_.tasks.begin(), plan_.tasks.end(),
                         [this](const AttentionTask& a, const AttentionTask& b) {
                             return comes_before(a.unit, b.unit);
                         });
        double work = 0;
        for (const AttentionTask& task : plan_.tasks) work += work_of(task.unit, shape_.group);
        plan_.alone = too_little(work);
    }

    AttentionPlan plan() && { return std::move(plan_); }

  private:
    // Blocks of prompts head by head, since each block reads all keys of its head before it, which so
    // stay in the second cache; then the rest. Of either the long ones first, so that no thread is left
    // alone with one at the end.
    bool comes_before(const AttentionUnit& a, const AttentionUnit& b) const {
        const bool of_prompt = a.tokens * shape_.group > kRowBlock / 2;
        if (of_prompt != (b.tokens * shape_.group > kRowBlock / 2)) return of_prompt;
        if (of_prompt && a.pages != b.pages) return a.pages < b.pages;
        if (of_prompt && a.kv_head != b.kv_head) return a.kv_head < b.kv_head;
        return work_of(a, shape_.group) > work_of(b, shape_.group);
    }

    bool too_little(double work) const {
        return shape_.threads == 1 ||
               work * static_cast<double>(shape_.head_dim) < kParallelThreshold;
    }

    // To units that run split by split: those that share one, and all where a few have long contexts.
    void give_slots() {
        double work = 0;
        for (const AttentionUnit& unit : units_) work += work_of(unit, shape_.group);
        const int64_t count = static_cast<int64_t>(units_.size());
        const bool few = count < 2 * shape_.threads && !too_little(work);
        std::vector<bool> shares(count / shape_.kv_heads, few);
        size_t rows = 0;
        for (const Together& group : shared_.groups()) {
            for (int64_t i = group.begin; i < group.end; ++i) {
                const int64_t run = shared_.reader(i).run;
                shares[run] = true;
                rows += units_[run * shape_.kv_heads].tokens;
            }
        }
        plan_.rows.reserve(rows);  // units point into it
        for (int64_t i = 0; i < count; ++i) {
            const AttentionUnit& unit = units_[i];
            if (!shares[i / shape_.kv_heads] || unit.num_splits() == 1) continue;
            first_slot_[i] = plan_.num_slots;
            plan_.num_slots += unit.num_splits();
            plan_.most_rows = std::max(plan_.most_rows, unit.tokens * shape_.group);
            plan_.merges.push_back({unit, first_slot_[i]});
        }
        is_read_.resize(plan_.num_slots);
    }

    void add_shared(const Together& group) {
        const Reader& first = shared_.reader(group.begin);
        const int64_t* rows = plan_.rows.data() + plan_.rows.size();
        int64_t tokens = 0;
        for (int64_t i = group.begin; i < group.end; ++i) {
            const AttentionUnit& unit = units_[shared_.reader(i).run * shape_.kv_heads];
            for (int64_t token = 0; token < unit.tokens; ++token)
                plan_.rows.push_back(unit.rows ? unit.rows[token] : unit.first_row + token);
            tokens += unit.tokens;
        }
        for (int64_t head = 0; head < shape_.kv_heads; ++head) {
            AttentionUnit all = piece_of(units_[first.run * shape_.kv_heads + head], first.split);
            all.rows = rows;
            all.tokens = static_cast<int32_t>(tokens);
            all.index = all.end_key;  // or later: every row attends the whole split
            const int64_t first_place = static_cast<int64_t>(plan_.places.size());
            for (int64_t i = group.begin; i < group.end; ++i) {
                const int64_t unit = shared_.reader(i).run * shape_.kv_heads + head;
                const int64_t slot = first_slot_[unit] + first.split;
                plan_.places.push_back({units_[unit].tokens, slot});
                is_read_[slot] = true;
            }
            plan_.tasks.push_back({all, first_place, group.end - group.begin});
        }
    }

    // What of a unit no shared split has read.
    void add_rest(const AttentionUnit& unit, int64_t first_slot) {
        if (first_slot < 0) {
            plan_.tasks.push_back({unit, 0, 0});
            return;
        }
        for (int64_t i = 0; i < unit.num_splits(); ++i) {
            if (is_read_[first_slot + i]) continue;
            const int64_t place = static_cast<int64_t>(plan_.places.size());
            plan_.places.push_back({unit.tokens, first_slot + i});
            plan_.tasks.push_back({piece_of(unit, unit.first_split() + i), place, 1});
        }
    }

    const AttentionShape& shape_;
    const std::vector<AttentionUnit>& units_;
    const SharedSplits shared_;
    std::vector<int64_t> first_slot_;  // of each unit; -1: it runs whole
    std::vector<bool> is_read_;        // of each slot: whether a shared split fills it
    AttentionPlan plan_;
};

}  // namespace

int64_t AttentionPlan::num_shared() const {
    return std::count_if(tasks.begin(), tasks.end(),
                         [](const AttentionTask& task) { return task.num_places > 1; });
}

AttentionPlan plan_attention(const AttentionShape& shape, const std::vector<AttentionUnit>& units,
                             int64_t page_size) {
    return Planner(shape, units, page_size).plan();
}

}  // namespace aioserve::ops

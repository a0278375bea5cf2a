// Entries of a row by rising key, of which only those that are looked at are sorted.
//
// An entry's bucket grows with its key, so buckets are in rank order; the weight up to each bucket's
// end says in which one a sum is reached. What is kept is a beginning of that order.

#pragma once

#include <cstdint>
#include <vector>

namespace aioserve::sampling {

struct Entry {
    float key;     // at least 0 and finite
    float logit;   // the larger comes first among equal keys, and the lower id among equal logits
    float weight;  // above 0
    int32_t id;
};

// Entries, field by field.
struct Entries {
    std::vector<float> keys, logits, weights;
    std::vector<int32_t> ids;
    int64_t count = 0;

    // Room for so many, the first `count` of which stay.
    void reserve(int64_t size);
    Entry at(int64_t i) const { return {keys[i], logits[i], weights[i], ids[i]}; }
    void set(int64_t i, const Entry& entry) {
        keys[i] = entry.key;
        logits[i] = entry.logit;
        weights[i] = entry.weight;
        ids[i] = entry.id;
    }
};

// Keeps its memory from one set of entries to the next.
class Ranked {
  public:
    // Looks at the entries until the next call; there is at least one.
    void assign(const Entries& entries);

    // Weight of the entries that are kept.
    double total() const { return ends_.back(); }

    // Drop all but the first `count`, at least one.
    void keep_first(int64_t count);
    // Drop all behind the first entry with which the weights reach `mass`. Returns its key.
    float keep_mass(double mass);
    // Drop those with a larger key. The first entry's key is none.
    void keep_within(float key);

    // Those that are kept, in an order that depends on the entries alone.
    void copy_kept(Entries& to);
    // Whether the entry at this place is kept.
    bool keeps(int64_t place) const;
    // The last in rank order that is kept.
    Entry last() const;

  private:
    // Sorts a bucket into `members_`, with the weights up to each in `member_ends_`.
    void open(int64_t bucket);
    // The first `count` of the open bucket are the last that are kept.
    void cut(int64_t count);

    const Entries* entries_ = nullptr;
    float scale_ = 0;
    std::vector<uint16_t> buckets_;  // of each entry
    std::vector<double> ends_;
    int64_t last_bucket_ = 0;  // that has entries which are kept
    int64_t last_count_ = 0;   // how many of it, in rank order; -1 for all
    Entry last_{};             // of these
    int64_t opened_ = -1;
    std::vector<Entry> members_;
    std::vector<double> member_ends_;
};

}  // namespace aioserve::sampling

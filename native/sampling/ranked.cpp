#include "sampling/ranked.h"

#include <algorithm>
#include <limits>

namespace aioserve::sampling {
namespace {

constexpr int64_t kBuckets = 2048;
constexpr int64_t kSortedAtOnce = 128;
constexpr int64_t kBlock = 32;
constexpr uint16_t kNone = 0xffff;

// Below the number of buckets, `most` + 1, and never falling with the key.
int32_t bucket_of(float key, float scale, float most) {
    const float place = key * scale;
    return static_cast<int32_t>(place < most ? place : most);
}

bool ranks_before(const Entry& a, const Entry& b) {
    if (a.key != b.key) return a.key < b.key;
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

}  // namespace

void Entries::reserve(int64_t size) {
    if (static_cast<int64_t>(ids.size()) >= size) return;
    const auto room = static_cast<std::size_t>(2 * size);
    keys.resize(room);
    logits.resize(room);
    weights.resize(room);
    ids.resize(room);
}

void Ranked::assign(const Entries& entries) {
    entries_ = &entries;
    const int64_t num_buckets = entries.count > kSortedAtOnce ? kBuckets : 1;
    const float* const keys = entries.keys.data();
    float widest = 0;
    for (int64_t i = 0; i < entries.count; ++i) widest = keys[i] > widest ? keys[i] : widest;
    const float most = static_cast<float>(num_buckets - 1);
    scale_ = widest > 0 ? std::min(most / widest, std::numeric_limits<float>::max()) : 0.0f;
    ends_.assign(static_cast<std::size_t>(num_buckets), 0.0);
    // Whole blocks, so that `open` may look at them whole.
    const int64_t blocks = (entries.count + kBlock - 1) / kBlock;
    if (static_cast<int64_t>(buckets_.size()) < blocks * kBlock)
        buckets_.resize(static_cast<std::size_t>(2 * blocks * kBlock));
    uint16_t* const buckets = buckets_.data();
    for (int64_t i = 0; i < entries.count; ++i)
        buckets[i] = static_cast<uint16_t>(bucket_of(keys[i], scale_, most));
    for (int64_t i = entries.count; i < blocks * kBlock; ++i) buckets[i] = kNone;
    double* const ends = ends_.data();
    const float* const weights = entries.weights.data();
    for (int64_t i = 0; i < entries.count; ++i) ends[buckets[i]] += static_cast<double>(weights[i]);
    for (int64_t i = 1; i < num_buckets; ++i) ends[i] += ends[i - 1];
    last_bucket_ = num_buckets - 1;
    last_count_ = -1;
    opened_ = -1;
}

void Ranked::open(int64_t bucket) {
    if (opened_ == bucket) return;
    opened_ = bucket;
    members_.clear();
    const auto wanted = static_cast<uint16_t>(bucket);
    for (int64_t begin = 0; begin < entries_->count; begin += kBlock) {
        const uint16_t* const block = buckets_.data() + begin;
        uint16_t found = 0;
        for (int64_t i = 0; i < kBlock; ++i) found |= block[i] == wanted ? 1 : 0;
        if (!found) continue;
        for (int64_t i = 0; i < kBlock; ++i)
            if (block[i] == wanted) members_.push_back(entries_->at(begin + i));
    }
    // Equal logits may be very many, and they come by rising id.
    if (!std::is_sorted(members_.begin(), members_.end(), ranks_before))
        std::sort(members_.begin(), members_.end(), ranks_before);
    member_ends_.clear();
    double end = bucket ? ends_[bucket - 1] : 0.0;
    for (const Entry& entry : members_)
        member_ends_.push_back(end += static_cast<double>(entry.weight));
}

void Ranked::cut(int64_t count) {
    if (opened_ > last_bucket_) return;
    if (opened_ == last_bucket_ && last_count_ >= 0) count = std::min(count, last_count_);
    last_bucket_ = opened_;
    last_count_ = count;
    if (count) last_ = members_[count - 1];
    const double before = opened_ ? ends_[opened_ - 1] : 0.0;
    const double end = count ? member_ends_[count - 1] : before;
    std::fill(ends_.begin() + opened_, ends_.end(), end);
}

void Ranked::keep_first(int64_t count) {
    if (count >= entries_->count) return;
    std::vector<int64_t> counts(ends_.size());
    for (int64_t i = 0; i < entries_->count; ++i) ++counts[buckets_[i]];
    int64_t bucket = 0;
    for (; count > counts[bucket]; ++bucket) count -= counts[bucket];
    open(bucket);
    cut(count);
}

float Ranked::keep_mass(double mass) {
    mass = std::min(mass, total());
    const int64_t bucket = std::lower_bound(ends_.begin(), ends_.end(), mass) - ends_.begin();
    open(bucket);
    const auto found = std::lower_bound(member_ends_.begin(), member_ends_.end(), mass);
    const int64_t count = std::min<int64_t>(found - member_ends_.begin() + 1,
                                            static_cast<int64_t>(members_.size()));
    cut(count);
    return members_[count - 1].key;
}

void Ranked::keep_within(float key) {
    const int64_t bucket = bucket_of(key, scale_, static_cast<float>(ends_.size() - 1));
    if (bucket > last_bucket_) return;
    open(bucket);
    int64_t count = 0;
    while (count < static_cast<int64_t>(members_.size()) && members_[count].key <= key) ++count;
    cut(count);
}

void Ranked::copy_kept(Entries& to) {
    open(last_bucket_);
    const int64_t count = last_count_ < 0 ? static_cast<int64_t>(members_.size()) : last_count_;
    to.count = 0;
    to.reserve(entries_->count + 1);
    for (int64_t i = 0; i < entries_->count; ++i) {
        to.set(to.count, entries_->at(i));
        to.count += buckets_[i] < last_bucket_;
    }
    for (int64_t i = 0; i < count; ++i) to.set(to.count++, members_[i]);
}

bool Ranked::keeps(int64_t place) const {
    const int64_t bucket = buckets_[place];
    if (bucket != last_bucket_ || last_count_ < 0) return bucket <= last_bucket_;
    return last_count_ && !ranks_before(last_, entries_->at(place));
}

Entry Ranked::last() const {
    if (last_count_ > 0) return last_;
    const int64_t last_bucket = last_count_ ? last_bucket_ : last_bucket_ - 1;
    Entry last{-1, 0, 0, 0};
    for (int64_t i = 0; i < entries_->count; ++i)
        if (buckets_[i] <= last_bucket && entries_->keys[i] >= last.key &&
            ranks_before(last, entries_->at(i)))
            last = entries_->at(i);
    return last;
}

}  // namespace aioserve::sampling

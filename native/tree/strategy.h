// In which order unlocked leaves are evicted: one small class per strategy, one method each.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

namespace aioserve {

// How a page was used, in ticks of the tree's logical clock.
struct NodeUse {
    int64_t created = 0;  // inherited by what the same receipt adds behind it
    int64_t last_used = 0;
    int64_t hits = 0;  // matches that covered it

    bool operator==(const NodeUse&) const = default;
};

// The smallest key is evicted first. Neighbours with equal keys may be merged into one node, and so
// share a use from then on: equal keys must stay equal through every further use that both share.
class EvictionStrategy {
  public:
    using Key = std::pair<int64_t, int64_t>;

    virtual ~EvictionStrategy() = default;
    virtual Key key(const NodeUse& use) const = 0;
    // Whether neighbours of these uses may be merged.
    virtual bool agree(const NodeUse& left, const NodeUse& right) const {
        return key(left) == key(right);
    }
    // Whether `listed` can be what `key` gave for `use` when it was listed.
    virtual bool gives(const Key& listed, const NodeUse& use) const { return listed == key(use); }
    // Whether keys that were given before are no longer in the order of those to come.
    virtual bool has_changed() const { return false; }
};

// An order from outside: `score` gives a number that isn't NaN, the smallest goes first, and the
// least recently used of equal ones. It is asked once for each run that becomes evictable. Where it
// gives nothing it has failed, isn't asked again, and the order is LRU from then on.
class CustomStrategy : public EvictionStrategy {
  public:
    using Score = std::function<std::optional<double>(const NodeUse&)>;

    explicit CustomStrategy(Score score) : score_(std::move(score)) {}

    Key key(const NodeUse& use) const override;
    // Nothing is known of the score but that it depends on the use alone, and asking takes time.
    bool agree(const NodeUse& left, const NodeUse& right) const override { return left == right; }
    bool gives(const Key& listed, const NodeUse& use) const override;
    bool has_changed() const override { return has_failed_; }

  private:
    Score score_;
    mutable bool has_failed_ = false;
};

// "lru", "lfu", "fifo" or "slru"; throws std::invalid_argument for any other name.
std::unique_ptr<EvictionStrategy> make_strategy(std::string_view name);

}  // namespace aioserve

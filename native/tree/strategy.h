// In which order unlocked leaves are evicted: one small class per strategy, one method each.

#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

namespace aioserve {

// How a page was used, in ticks of the tree's logical clock.
struct NodeUse {
    int64_t created = 0;  // inherited by what the same receipt adds behind it
    int64_t last_used = 0;
    int64_t hits = 0;  // matches that covered it
};

// The smallest key is evicted first. Neighbours with equal keys may be merged into one node, and so
// share a use from then on: equal keys must stay equal through every further use that both share.
class EvictionStrategy {
  public:
    using Key = std::pair<int64_t, int64_t>;

    virtual ~EvictionStrategy() = default;
    virtual Key key(const NodeUse& use) const = 0;
};

// "lru", "lfu", "fifo" or "slru"; throws std::invalid_argument for any other name.
std::unique_ptr<EvictionStrategy> make_strategy(std::string_view name);

}  // namespace aioserve

#include "tree/strategy.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

namespace aioserve {

namespace {

// Least recently used first: the order of RadixAttention (Zheng et al., arXiv 2312.07104, 3.2).
class Lru : public EvictionStrategy {
  public:
    Key key(const NodeUse& use) const override { return {use.last_used, 0}; }
};

// Least frequently used first, the least recent of them first.
class Lfu : public EvictionStrategy {
    Key key(const NodeUse& use) const override { return {use.hits, use.last_used}; }
};

// Oldest first, however often it was used.
class Fifo : public EvictionStrategy {
    Key key(const NodeUse& use) const override { return {use.created, 0}; }
};

// Segmented LRU (Karedla, Love and Wherry, "Caching strategies to improve disk system performance",
// IEEE Computer 27(3), 1994): what was never matched again is on probation and goes before what
// was, least recently used first in both. The protected segment has no bound of its own here.
class SegmentedLru : public EvictionStrategy {
    Key key(const NodeUse& use) const override {
        return {std::min<int64_t>(use.hits, 1), use.last_used};
    }
};

// The integer that stands where `number` stands among doubles.
int64_t ordered(double number) {
    const auto bits = std::bit_cast<int64_t>(number + 0.0);  // -0.0 is 0.0
    return bits < 0 ? bits ^ std::numeric_limits<int64_t>::max() : bits;
}

}  // namespace

EvictionStrategy::Key CustomStrategy::key(const NodeUse& use) const {
    if (!has_failed_) {
        if (const std::optional<double> score = score_(use)) return {ordered(*score), use.last_used};
        has_failed_ = true;
    }
    return Lru{}.key(use);
}

bool CustomStrategy::gives(const Key& listed, const NodeUse& use) const {
    return listed.second == use.last_used || (has_failed_ && listed == Lru{}.key(use));
}

std::unique_ptr<EvictionStrategy> make_strategy(std::string_view name) {
    if (name == "lru") return std::make_unique<Lru>();
    if (name == "lfu") return std::make_unique<Lfu>();
    if (name == "fifo") return std::make_unique<Fifo>();
    if (name == "slru") return std::make_unique<SegmentedLru>();
    throw std::invalid_argument("strategy must be lru, lfu, fifo or slru, got " +
                                std::string(name));
}

}  // namespace aioserve

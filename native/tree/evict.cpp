// What leaves the tree: eviction in the strategy's order, and what failed or was given up.

#include <algorithm>
#include <unordered_set>

#include "tree/prefix_tree.h"

namespace aioserve {

namespace {

void check_count(int64_t count, const char* name) {
    if (count < 0) {
        throw std::invalid_argument(std::string(name) + " must be at least 0, got " +
                                    std::to_string(count));
    }
}

}  // namespace

// The order in which leaves of a tier go. A strategy that changed has all of them listed anew.
const EvictionOrder& PrefixTree::order_of(Tier tier) {
    if (strategy_->has_changed() && !is_relisted_) {
        is_relisted_ = true;
        for (const std::unique_ptr<Node>& node : nodes_) {
            if (!node->is_listed) continue;
            unlist(node.get());
            list_or_unlist(node.get());
        }
    }
    return tiers_[tier].order;
}

void PrefixTree::drop_tail(Node* leaf, size_t num_pages) {
    std::vector<ReceiptId> none;
    const size_t left = leaf->pages.size() - num_pages;
    Node* end = drop(leaf, left, none);
    if (left == 0 && end != nullptr && end->children.size() == 1) {
        merge_upwards(end->children.begin()->node);
    }
}

// Makes pages of the next tier free for up to `wanted` of the last pages of a leaf; returns for how
// many. Equal to making room for one page after another, each of which becomes a leaf of that tier
// in its turn.
size_t PrefixTree::make_room(const Node& leaf, size_t wanted, Step step, Evicted& evicted) {
    const auto next = static_cast<Tier>(leaf.tier + 1);
    const PagePool& pool = *tiers_[next].pool;
    const EvictionOrder& order = order_of(next);
    const Key key = leaf.listing->first;
    const auto room = [&] { return std::min(wanted, static_cast<size_t>(pool.num_free())); };
    const auto give_up_first = [&](size_t count) {
        Node* first = order.begin()->second;
        give_up_tail(first, std::min(count, first->pages.size()), step, evicted);
    };
    while (room() < wanted && !order.empty() && order.begin()->first < key) {
        const size_t before = room();
        give_up_first(wanted - before);
        if (room() == before) return before;  // its page is somebody's: no more is lost for it
    }
    if (room() == 0 && !order.empty()) {
        // A page with a larger key makes place for the first; what follows replaces that again.
        give_up_first(order.begin()->first == key ? wanted : 1);
    }
    return room();
}

// Makes pages of the next tier free for up to `wanted` of the last pages of a leaf; returns for how
// many. Pages with group pages move one by one: they differ in size, so that where there is no room
// for one, there may be for the next.
size_t PrefixTree::room_for(const Node& leaf, size_t wanted, Step step, Evicted& evicted) {
    if (!has_other_groups()) return make_room(leaf, wanted, step, evicted);
    return make_room_for_tail(leaf, step, evicted) ? 1 : 0;
}

void PrefixTree::demote(Node* leaf, size_t num_pages, Step step, Evicted& evicted) {
    const Tier tier = leaf->tier;
    const auto next = static_cast<Tier>(tier + 1);
    PagePool& pool = *tiers_[next].pool;
    std::vector<Page> targets(static_cast<size_t>(size_of_tail(*leaf, num_pages)));
    pool.acquire(targets);
    if (num_pages < leaf->pages.size()) split(leaf, leaf->pages.size() - num_pages);
    std::vector<Page> sources(leaf->pages);
    const std::span<const Page> others = tiers_[tier].pool->group_pages(leaf->pages.back());
    sources.insert(sources.end(), others.begin(), others.end());
    for (size_t i = 0; i < sources.size(); ++i) {
        evicted.moves.push_back({tier, sources[i], targets[i]});
    }
    const std::span<const Page> taken(targets);
    move_to(leaf, next, taken.first(num_pages), step, PagePool::kNoStep);
    if (const auto beside = taken.subspan(num_pages); !beside.empty()) {
        attach(next, leaf->pages.back(), beside);
        pool.release(beside, PagePool::kNoStep);
    }
    if (leaf->children.size() == 1) merge_upwards(leaf->children.begin()->node);
}

// Gives up to `wanted` of the last pages of a leaf up, as many as go one way: to the next tier, or
// out of the tree. Returns how many.
size_t PrefixTree::give_up_tail(Node* leaf, size_t wanted, Step step, Evicted& evicted) {
    size_t room = 0;
    if (has_next(leaf->tier)) {
        // A page that isn't written yet stays with the step that writes it: a copy of the page would
        // bear the number of another, and be found after the first has failed.
        const bool written = is_written(leaf->steps.back());
        const auto other = std::find_if(leaf->steps.rbegin(), leaf->steps.rend(),
                                        [&](Step one) { return is_written(one) != written; });
        wanted = std::min(wanted, static_cast<size_t>(other - leaf->steps.rbegin()));
        if (written && has_other_groups()) wanted = 1;
        if (written) room = room_for(*leaf, wanted, step, evicted);
    }
    if (room == 0) {
        drop_tail(leaf, wanted);
        return wanted;
    }
    demote(leaf, room, step, evicted);
    return room;
}

// Leaves out of `evicted` what was dropped again after it was moved.
void PrefixTree::forget_overwritten(Evicted& evicted) {
    std::vector<Move>& moves = evicted.moves;
    const auto mark_of = [&](const Move& move) -> uint8_t& {
        return tiers_[move.tier + size_t{1}].in_tree[static_cast<size_t>(move.target)];
    };
    size_t kept = moves.size();
    for (size_t i = kept; i-- > 0;) {
        uint8_t& mark = mark_of(moves[i]);
        if (mark != 1) continue;
        mark = 2;
        moves[--kept] = moves[i];
    }
    moves.erase(moves.begin(), moves.begin() + static_cast<std::ptrdiff_t>(kept));
    for (const Move& move : moves) mark_of(move) = 1;
}

int64_t PrefixTree::evict_from(Tier tier, int64_t count, Step step, Evicted& evicted) {
    int64_t given_up = 0;
    while (given_up < count) {
        if (strip_goes_first(tier)) {
            strip_first(tier);
            given_up += tiers_[tier].pool->num_group_pages();
            continue;
        }
        const EvictionOrder& order = order_of(tier);
        if (order.empty()) break;
        Node* leaf = order.begin()->second;
        const int64_t before = pages_of(tier);
        give_up_tail(leaf, tail_that_frees(*leaf, count - given_up), step, evicted);
        given_up += before - pages_of(tier);
    }
    return given_up;
}

// Moves go in the order in which they are made. A page that was moved in `step` isn't written yet,
// so that no page moves twice in it.
PrefixTree::Evicted PrefixTree::evict(Tier tier, int64_t count, Step step) {
    check_count(count, "count");
    if (tier == kNearest || has_next(tier)) check_step(step, "evict");
    Evicted evicted;
    evicted.count = evict_from(tier, count, step, evicted);
    forget_overwritten(evicted);
    return evicted;
}

bool PrefixTree::is_touched(std::span<const Page> pages) const {
    const PagePool& pool = *tiers_[kNearest].pool;
    return std::any_of(pages.begin(), pages.end(),
                       [&](Page page) { return pool.is_touched(page); });
}

// Whether `evict` would give up so many pages and no step in flight touches them: goes through what
// it would do, and changes nothing.
bool PrefixTree::frees_at_once(int64_t count) {
    check_count(count, "count");
    if (count > num_evictable()) return false;
    const EvictionOrder& order = order_of(kNearest);
    const PagePool& pool = *tiers_[kNearest].pool;
    auto listed = order.begin();
    EvictionOrder bared;                                // leaves once those below have gone
    std::unordered_map<const Node*, int64_t> num_gone;  // of a node's children in the tier
    std::unordered_set<Page> stripped;                  // pages whose group pages went before them
    auto idle = pool.idle().begin();
    while (count > 0) {
        const bool is_bared =
            !bared.empty() && (listed == order.end() || *bared.begin() < *listed);
        const bool is_left = is_bared || listed != order.end();
        const Node* leaf =
            !is_left ? nullptr : is_bared ? bared.begin()->second : listed->second;
        if (idle != pool.idle().end() && (!leaf || idle->since < leaf->use.last_used)) {
            // A page that has gone already took its group pages with it.
            if (stripped.insert(idle->owner).second) {
                if (is_touched(pool.group_pages(idle->owner))) return false;
                count -= pool.num_group_pages();
            }
            ++idle;
            continue;
        }
        if (leaf == nullptr) return false;
        if (is_bared) {
            bared.erase(bared.begin());
        } else {
            ++listed;
        }
        for (size_t i = leaf->pages.size(); i-- > 0 && count > 0;) {
            const Page page = leaf->pages[i];
            if (pool.is_touched(page)) return false;
            --count;
            if (!pool.has_group_pages(page) || !stripped.insert(page).second) continue;
            if (is_touched(pool.group_pages(page))) return false;
            count -= pool.num_group_pages();
        }
        Node* parent = leaf->parent;
        if (parent->is_root() || parent->num_locks > 0) continue;
        if (++num_gone[parent] == parent->num_children[kNearest]) {
            bared.emplace(strategy_->key(parent->use), parent);
        }
    }
    return true;
}

void PrefixTree::clear() {
    std::vector<Node*> tops;  // unlocked, below a locked node or a root
    for (const std::unique_ptr<Node>& node : nodes_) {
        if (node->is_root() || node->num_locks > 0) continue;
        if (node->parent->is_root() || node->parent->num_locks > 0) tops.push_back(node.get());
    }
    std::vector<ReceiptId> none;
    for (Node* node : tops) drop(node, 0, none);
    if (!has_other_groups()) return;
    for (size_t tier = 0; tier < tiers_.size(); ++tier) {
        while (tiers_[tier].pool->num_idle() > 0) strip_first(static_cast<Tier>(tier));
    }
}

// Drops and notes the receipts that this shortens, with the `num_pages` that each still covers.
void PrefixTree::drop_and_list(Node* node, size_t from, int64_t num_pages,
                               std::vector<Shortened>& list) {
    std::vector<ReceiptId> moved;
    drop(node, from, moved);
    for (const ReceiptId receipt : moved) list.push_back({receipt, num_pages});
}

std::vector<PrefixTree::Shortened> PrefixTree::withdraw(Step step) {
    struct Place {
        Node* node;
        size_t from;
        int64_t num_pages;  // on the path above `from`
    };
    std::vector<Place> waiting;
    std::vector<Place> found;
    for (const auto& [name_space, root] : roots_) waiting.push_back({root, 0, 0});
    while (!waiting.empty()) {
        auto [node, from, num_pages] = waiting.back();
        waiting.pop_back();
        const auto first = std::find(node->steps.begin(), node->steps.end(), step);
        from = static_cast<size_t>(first - node->steps.begin());
        num_pages += static_cast<int64_t>(from);
        if (first != node->steps.end()) {
            found.push_back({node, from, num_pages});
        } else {
            for (const Child& child : node->children) waiting.push_back({child.node, 0, num_pages});
        }
    }
    std::vector<Shortened> list;
    for (const Place& place : found) drop_and_list(place.node, place.from, place.num_pages, list);
    std::sort(list.begin(), list.end());
    return list;
}

std::vector<PrefixTree::Shortened> PrefixTree::cut(ReceiptId receipt, int64_t num_pages) {
    check_count(num_pages, "num_pages");
    Node* node = receipt_of(receipt, "cut").end;
    const auto left = static_cast<size_t>(num_pages);
    std::vector<Shortened> list;
    if (left >= node->num_above + node->pages.size()) return list;
    while (node->num_above > left) node = node->parent;
    drop_and_list(node, left - node->num_above, num_pages, list);
    std::sort(list.begin(), list.end());
    return list;
}

}  // namespace aioserve

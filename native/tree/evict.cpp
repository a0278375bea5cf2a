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

// Makes host pages free for up to `wanted` device pages of strategy key `key`; returns how many.
// Equal to making room for one page after another, each of which becomes a host leaf in its turn.
size_t PrefixTree::make_room(const Key& key, size_t wanted) {
    PagePool* pool = tiers_[kHost].pool;
    if (pool == nullptr) return 0;
    const EvictionOrder& order = order_of(kHost);
    const auto room = [&] { return std::min(wanted, static_cast<size_t>(pool->num_free())); };
    const auto drop_first = [&](size_t count) {
        Node* leaf = order.begin()->second;
        drop_tail(leaf, std::min(count, leaf->pages.size()));
    };
    while (room() < wanted && !order.empty() && order.begin()->first < key) {
        const size_t before = room();
        drop_first(wanted - before);
        if (room() == before) return before;  // its page is somebody's: no more is lost for it
    }
    if (room() == 0 && !order.empty()) {
        // A page with a larger key makes place for the first; what follows replaces that again.
        drop_first(order.begin()->first == key ? wanted : 1);
    }
    return room();
}

// Whether pages go to the host one by one: they differ in size, so that where there is no room for
// one, there may be for the next.
bool PrefixTree::moves_one_by_one() const { return has_windows() && tiers_[kHost].pool != nullptr; }

// Makes host pages free for up to `wanted` of the last pages of a leaf; returns for how many.
size_t PrefixTree::room_for(const Key& key, const Node& leaf, size_t wanted) {
    if (!moves_one_by_one()) return make_room(key, wanted);
    return make_room_for_tail(leaf) ? 1 : 0;
}

void PrefixTree::demote(Node* leaf, size_t num_pages, Step step, Evicted& evicted) {
    PagePool& host = *tiers_[kHost].pool;
    std::vector<Page> host_pages(static_cast<size_t>(size_of_tail(*leaf, num_pages)));
    host.acquire(host_pages);
    if (num_pages < leaf->pages.size()) split(leaf, leaf->pages.size() - num_pages);
    std::vector<Page>& sources = evicted.device_pages;
    sources.insert(sources.end(), leaf->pages.begin(), leaf->pages.end());
    const std::span<const Page> windows = tiers_[kDevice].pool->companions(leaf->pages.back());
    sources.insert(sources.end(), windows.begin(), windows.end());
    evicted.host_pages.insert(evicted.host_pages.end(), host_pages.begin(), host_pages.end());
    const std::span<const Page> targets(host_pages);
    move_to(leaf, kHost, targets.first(num_pages), step, PagePool::kNoStep);
    if (const auto host_windows = targets.subspan(num_pages); !host_windows.empty()) {
        attach(kHost, leaf->pages.back(), host_windows);
        host.release(host_windows, PagePool::kNoStep);
    }
    if (leaf->children.size() == 1) merge_upwards(leaf->children.begin()->node);
}

// Leaves out of `evicted` what was dropped from the host again after it was put there.
void PrefixTree::forget_overwritten(Evicted& evicted) {
    std::vector<uint8_t>& in_tree = tiers_[kHost].in_tree;
    size_t kept = evicted.host_pages.size();
    for (size_t i = kept; i-- > 0;) {
        uint8_t& mark = in_tree[static_cast<size_t>(evicted.host_pages[i])];
        if (mark != 1) continue;
        mark = 2;
        --kept;
        evicted.device_pages[kept] = evicted.device_pages[i];
        evicted.host_pages[kept] = evicted.host_pages[i];
    }
    const auto unused = static_cast<int64_t>(kept);
    for (std::vector<Page>* pages : {&evicted.device_pages, &evicted.host_pages}) {
        pages->erase(pages->begin(), pages->begin() + unused);
    }
    for (const Page page : evicted.host_pages) in_tree[static_cast<size_t>(page)] = 1;
}

PrefixTree::Evicted PrefixTree::evict(int64_t count, Step step) {
    check_count(count, "count");
    check_step(step, "evict");
    Evicted evicted;
    while (evicted.count < count) {
        if (strip_goes_first(kDevice)) {
            strip_first(kDevice);
            evicted.count += tiers_[kDevice].pool->num_companions();
            continue;
        }
        if (order_of(kDevice).empty()) break;
        const auto [key, leaf] = *order_of(kDevice).begin();
        const size_t needed = tail_that_frees(*leaf, count - evicted.count);
        // A page that isn't written yet stays with the step that writes it: a copy of the page would
        // bear the number of another, and be found after the first has failed.
        const bool written = is_written(leaf->steps.back());
        const auto other = std::find_if(leaf->steps.rbegin(), leaf->steps.rend(),
                                        [&](Step one) { return is_written(one) != written; });
        size_t wanted = std::min(needed, static_cast<size_t>(other - leaf->steps.rbegin()));
        if (written && moves_one_by_one()) wanted = 1;
        const size_t room = written ? room_for(key, *leaf, wanted) : 0;
        const size_t gone = room > 0 ? room : wanted;
        evicted.count += size_of_tail(*leaf, gone);
        if (room > 0) {
            demote(leaf, gone, step, evicted);
        } else {
            drop_tail(leaf, gone);
        }
    }
    forget_overwritten(evicted);
    return evicted;
}

bool PrefixTree::is_touched(std::span<const Page> pages) const {
    const PagePool& pool = *tiers_[kDevice].pool;
    return std::any_of(pages.begin(), pages.end(),
                       [&](Page page) { return pool.is_touched(page); });
}

// Whether `evict` would give up so many pages and no step in flight touches them: goes through what
// it would do, and changes nothing.
bool PrefixTree::frees_at_once(int64_t count) {
    check_count(count, "count");
    if (count > num_evictable()) return false;
    const EvictionOrder& order = order_of(kDevice);
    const PagePool& pool = *tiers_[kDevice].pool;
    auto listed = order.begin();
    EvictionOrder bared;                                // leaves once those below have gone
    std::unordered_map<const Node*, int64_t> num_gone;  // of a node's children on the device
    std::unordered_set<Page> stripped;                  // pages whose companions went before them
    auto idle = pool.idle().begin();
    while (count > 0) {
        const bool is_bared =
            !bared.empty() && (listed == order.end() || *bared.begin() < *listed);
        const bool is_left = is_bared || listed != order.end();
        const Node* leaf =
            !is_left ? nullptr : is_bared ? bared.begin()->second : listed->second;
        if (idle != pool.idle().end() && (!leaf || idle->since < leaf->use.last_used)) {
            // A page that has gone already took its companions with it.
            if (stripped.insert(idle->owner).second) {
                if (is_touched(pool.companions(idle->owner))) return false;
                count -= pool.num_companions();
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
            if (!pool.has_companions(page) || !stripped.insert(page).second) continue;
            if (is_touched(pool.companions(page))) return false;
            count -= pool.num_companions();
        }
        Node* parent = leaf->parent;
        if (parent->is_root() || parent->num_locks > 0) continue;
        if (++num_gone[parent] == parent->num_device_children) {
            bared.emplace(strategy_->key(parent->use), parent);
        }
    }
    return true;
}

int64_t PrefixTree::evict_host(int64_t count) {
    check_count(count, "count");
    int64_t dropped = 0;
    while (dropped < count) {
        if (strip_goes_first(kHost)) {
            strip_first(kHost);
            dropped += tiers_[kHost].pool->num_companions();
            continue;
        }
        if (order_of(kHost).empty()) break;
        Node* leaf = order_of(kHost).begin()->second;
        const size_t wanted = tail_that_frees(*leaf, count - dropped);
        dropped += size_of_tail(*leaf, wanted);
        drop_tail(leaf, wanted);
    }
    return dropped;
}

void PrefixTree::clear() {
    std::vector<Node*> tops;  // unlocked, below a locked node or a root
    for (const std::unique_ptr<Node>& node : nodes_) {
        if (node->is_root() || node->num_locks > 0) continue;
        if (node->parent->is_root() || node->parent->num_locks > 0) tops.push_back(node.get());
    }
    std::vector<ReceiptId> none;
    for (Node* node : tops) drop(node, 0, none);
    for (const Tier tier : {kDevice, kHost}) {
        if (tiers_[tier].num_companions() == 0) continue;
        while (tiers_[tier].pool->num_idle() > 0) strip_first(tier);
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

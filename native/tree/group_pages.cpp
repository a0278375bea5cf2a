// Group pages: what groups beyond group 0 keep of a page's tokens. It goes before what everything
// behind needs.

#include <algorithm>

#include "tree/prefix_tree.h"

namespace aioserve {

int64_t PrefixTree::pages_of(Tier tier) const {
    const TierBooks& books = tiers_[tier];
    return books.num_pages +
           books.num_with_group_pages * static_cast<int64_t>(books.num_group_pages());
}

int64_t PrefixTree::evictable_of(Tier tier) const {
    const TierBooks& books = tiers_[tier];
    if (books.num_group_pages() == 0) return books.num_evictable;
    return books.num_evictable + books.pool->num_idle() * books.pool->num_group_pages();
}

// Whether the page lacks group pages where pages have some.
bool PrefixTree::lacks_group_pages(const Node& node, size_t index) const {
    return has_other_groups() && !tiers_[node.tier].pool->has_group_pages(node.pages[index]);
}

// The first page whose group pages the token behind `num_pages` pages needs.
size_t PrefixTree::first_needed(size_t num_pages) const {
    const size_t position = num_pages * page_size_;
    return position < needed_tokens_ ? 0 : (position - needed_tokens_ + 1) / page_size_;
}

// The most pages of the path of `tokens` behind which a sequence can go on.
size_t PrefixTree::num_usable(const Node& root, std::span<const Token> tokens) const {
    const Node* node = &root;
    size_t num_pages = 0;
    size_t first = 0;  // from here on none lacks group pages
    size_t usable = 0;
    while (true) {
        const auto [child, common] = next_found(*node, tokens);
        if (child == nullptr) return usable;
        for (size_t i = 0; i < common; ++i) {
            ++num_pages;
            if (lacks_group_pages(*child, i)) first = num_pages;
            if (first <= first_needed(num_pages)) usable = num_pages;
        }
        if (common < child->pages.size()) return usable;
        tokens = tokens.subspan(common * page_size_);
        node = child;
    }
}

// Returns the group pages in `others`, which are for the last of `num_pages` pages, of page number
// `index`; none if it is before these.
std::span<const Page> PrefixTree::group_pages_of(std::span<const Page> others, size_t num_pages,
                                                 size_t index) const {
    const size_t count = tiers_[kNearest].num_group_pages();
    const size_t behind = (num_pages - index) * count;
    if (behind > others.size()) return {};
    return others.subspan(others.size() - behind, count);
}

// Checks pages that are to be group pages of the last of `pages`, of which the tree has the first
// `num_kept` already.
void PrefixTree::check_group_pages(std::span<const Page> others, std::span<const Page> pages,
                                   size_t num_kept, const char* operation) const {
    if (others.empty()) return;
    const size_t count = tiers_[kNearest].num_group_pages();
    if (count == 0 || others.size() % count != 0 || others.size() > pages.size() * count) {
        throw TreeError(std::string(operation) + ": " + std::to_string(others.size()) +
                        " group pages for " + std::to_string(pages.size()) +
                        " pages, each of which has " + std::to_string(count));
    }
    check_held(others, operation);
    std::vector<Page> named(others.begin(), others.end());
    named.insert(named.end(), pages.begin(), pages.end());
    std::sort(named.begin(), named.end());
    if (const auto twice = std::adjacent_find(named.begin(), named.end()); twice != named.end()) {
        throw TreeError(std::string(operation) + ": page " + std::to_string(*twice) +
                        " is named twice");
    }
    const size_t num_new = std::min(others.size(), (pages.size() - num_kept) * count);
    for (const Page page : others.last(num_new)) {
        if (tiers_[kNearest].in_tree[static_cast<size_t>(page)] == 0) continue;
        throw TreeError(std::string(operation) + ": group page " + std::to_string(page) +
                        " is in the tree already");
    }
}

// Gives pages of `node` from number `first` on their group pages, where they have none; `num_pages`
// pages begin there, and `others` are for the last of these. `step` writes them.
void PrefixTree::give_group_pages(Node* node, size_t first, size_t num_pages,
                                  std::span<const Page> others, Step step) {
    if (others.empty()) return;
    for (size_t i = 0; first + i < node->pages.size() && i < num_pages; ++i) {
        const std::span<const Page> own = group_pages_of(others, num_pages, i);
        Step& written = node->steps[first + i];
        if (own.empty() || !lacks_group_pages(*node, first + i)) continue;
        // A step that fails takes with it what it should have written, and a page has one step.
        if (written != step && !is_written(written)) continue;
        const std::vector<uint8_t>& in_tree = tiers_[kNearest].in_tree;
        const auto is_in_tree = [&](Page page) { return in_tree[static_cast<size_t>(page)] != 0; };
        if (std::any_of(own.begin(), own.end(), is_in_tree)) continue;
        attach(kNearest, node->pages[first + i], own);
        written = step;
    }
}

void PrefixTree::attach(Tier tier, Page owner, std::span<const Page> others) {
    TierBooks& books = tiers_[tier];
    books.pool->attach(owner, others);
    for (const Page page : others) books.in_tree[static_cast<size_t>(page)] = 1;
    ++books.num_with_group_pages;
}

void PrefixTree::strip(Tier tier, Page owner, Step last_step) {
    TierBooks& books = tiers_[tier];
    for (const Page page : books.pool->group_pages(owner)) {
        books.in_tree[static_cast<size_t>(page)] = 0;
    }
    books.pool->detach(owner, last_step);
    --books.num_with_group_pages;
}

// Whether the group pages that are idle for longest go before the next leaf of the tier: nobody has
// used them since before it was used last. A leaf of that age takes them with it.
bool PrefixTree::strip_goes_first(Tier tier) {
    const TierBooks& books = tiers_[tier];
    if (books.num_group_pages() == 0 || books.pool->num_idle() == 0) return false;
    const EvictionOrder& order = order_of(tier);
    if (order.empty()) return true;
    return books.pool->idle().begin()->since < order.begin()->second->use.last_used;
}

void PrefixTree::strip_first(Tier tier) {
    strip(tier, tiers_[tier].pool->idle().begin()->owner, PagePool::kNoStep);
}

// Pages that go with the last `num_pages` of a leaf, group pages included.
int64_t PrefixTree::size_of_tail(const Node& leaf, size_t num_pages) const {
    const TierBooks& books = tiers_[leaf.tier];
    auto count = static_cast<int64_t>(num_pages);
    if (books.num_group_pages() == 0) return count;
    for (const Page page : std::span<const Page>(leaf.pages).last(num_pages)) {
        if (books.pool->has_group_pages(page)) count += books.pool->num_group_pages();
    }
    return count;
}

// How many of the last pages of a leaf must go for `count` pages, all of them if need be.
size_t PrefixTree::tail_that_frees(const Node& leaf, int64_t count) const {
    const size_t size = leaf.pages.size();
    if (!has_other_groups()) return std::min(static_cast<size_t>(count), size);
    size_t num_pages = 0;
    while (num_pages < size && count > 0) {
        ++num_pages;
        const bool lacks = lacks_group_pages(leaf, size - num_pages);
        count -= 1 + (lacks ? 0 : tiers_[leaf.tier].pool->num_group_pages());
    }
    return num_pages;
}

// Makes pages of the next tier free for the last page of `leaf` and its group pages, in the order
// in which `evict` gives them up.
bool PrefixTree::make_room_for_tail(const Node& leaf, Step step, Evicted& evicted) {
    const auto next = static_cast<Tier>(leaf.tier + 1);
    const PagePool& pool = *tiers_[next].pool;
    const int64_t wanted = size_of_tail(leaf, 1);
    if (pool.num_free() + evictable_of(next) < wanted) return false;
    while (pool.num_free() < wanted) {
        const int64_t before = pool.num_free();
        evict_from(next, 1, step, evicted);
        if (pool.num_free() == before) break;  // its page is somebody's: no more is lost for it
    }
    return pool.num_free() >= wanted;
}

}  // namespace aioserve

#include "tree/prefix_tree.h"

#include <algorithm>

namespace aioserve {

PrefixTree::PrefixTree(const std::vector<PagePool*>& pools,
                       std::unique_ptr<EvictionStrategy> strategy, int64_t needed_tokens)
    : strategy_(std::move(strategy)) {
    if (pools.empty() || pools.size() > kMostTiers) {
        throw std::invalid_argument("pools must be 1 to " + std::to_string(kMostTiers) +
                                    ", got " + std::to_string(pools.size()));
    }
    if (needed_tokens < 1) {
        throw std::invalid_argument("needed_tokens must be at least 1, got " +
                                    std::to_string(needed_tokens));
    }
    const PagePool& first = *pools[0];
    for (size_t i = 1; i < pools.size(); ++i) {
        if (std::find(pools.begin(), pools.begin() + static_cast<std::ptrdiff_t>(i), pools[i]) !=
            pools.begin() + static_cast<std::ptrdiff_t>(i)) {
            throw std::invalid_argument("pools must differ from each other");
        }
        if (pools[i]->page_size() != first.page_size()) {
            throw std::invalid_argument("pools must have pages of " +
                                        std::to_string(first.page_size()) +
                                        " tokens like the first, got " +
                                        std::to_string(pools[i]->page_size()));
        }
        if (pools[i]->num_group_pages() != first.num_group_pages()) {
            throw std::invalid_argument("pools must have as many group pages as the first, " +
                                        std::to_string(first.num_group_pages()) + ", got " +
                                        std::to_string(pools[i]->num_group_pages()));
        }
    }
    page_size_ = static_cast<size_t>(first.page_size());
    needed_tokens_ = static_cast<size_t>(needed_tokens);
    for (PagePool* pool : pools) {
        const auto size = static_cast<size_t>(pool->num_pages());
        tiers_.push_back(TierBooks{pool, std::vector<uint8_t>(size, 0), {}});
    }
}

const Receipt& PrefixTree::receipt_of(ReceiptId receipt, const char* operation) const {
    const auto found = receipts_.find(receipt);
    if (found == receipts_.end()) {
        throw TreeError(std::string(operation) + ": receipt " + std::to_string(receipt) +
                        " is not live");
    }
    return found->second;
}

Receipt& PrefixTree::receipt_of(ReceiptId receipt, const char* operation) {
    return const_cast<Receipt&>(std::as_const(*this).receipt_of(receipt, operation));
}

Node* PrefixTree::root_of(std::string_view name_space) {
    const auto found = roots_.find(name_space);
    if (found != roots_.end()) return found->second;
    Node* root = add_node();
    root->name_space = &roots_.emplace(name_space, root).first->first;
    return root;
}

// The child with the next pages of `tokens`.
PrefixTree::Next PrefixTree::next_of(const Node& node, std::span<const Token> tokens) const {
    if (tokens.size() < page_size_ || node.children.empty()) return {nullptr, 0};
    const auto found = node.children.size() == 1
                           ? node.children.begin()
                           : node.children.lower_bound(tokens.first(page_size_));
    if (found == node.children.end() || found->first != tokens[0]) return {nullptr, 0};
    const size_t num_pages = common_prefix(found->node->tokens, tokens) / page_size_;
    return {num_pages > 0 ? found->node : nullptr, num_pages};
}

// What a match finds next: behind a page of a later tier whose copy isn't made yet, nothing.
PrefixTree::Next PrefixTree::next_found(const Node& node, std::span<const Token> tokens) const {
    const Next next = next_of(node, tokens);
    if (next.node == nullptr || next.node->tier == kNearest) return next;
    size_t written = 0;
    while (written < next.num_pages && is_written(next.node->steps[written])) ++written;
    return {written > 0 ? next.node : nullptr, written};
}

// The child whose first page is written, in the nearest tier, and begins with the most of `tokens`.
// Looks at a few siblings in each direction only: with very many, most are no use in the same way.
Node* PrefixTree::find_tail(const Node& node, std::span<const Token> tokens,
                            size_t& num_tokens) const {
    constexpr int kTries = 8;
    tokens = tokens.first(std::min(tokens.size(), page_size_ - 1));
    Node* best = nullptr;
    num_tokens = 0;
    // True while a sibling further on may be better.
    const auto look_at = [&](Node* child) {
        const size_t common =
            common_prefix(std::span<const Token>(child->tokens).first(page_size_), tokens);
        if (common <= num_tokens) return false;
        if (child->tier != kNearest || !is_written(child->steps[0])) return true;
        if (lacks_group_pages(*child, 0)) return true;
        best = child;
        num_tokens = common;
        return false;
    };
    const auto middle = node.children.lower_bound(tokens);
    auto next = middle;
    for (int i = 0; i < kTries && next != node.children.end() && look_at(next->node); ++i) ++next;
    auto previous = middle;
    for (int i = 0; i < kTries && previous != node.children.begin(); ++i) {
        if (!look_at((--previous)->node)) break;
    }
    return best;
}

void PrefixTree::tick() {
    ++now_;
    for (const TierBooks& books : tiers_) {
        if (books.num_group_pages() > 0) books.pool->set_clock(now_);
    }
}

void PrefixTree::visit(Node* node, bool use) {
    lock(node);
    if (!use) return;
    node->use.last_used = now_;
    ++node->use.hits;
}

ReceiptId PrefixTree::give_receipt(Node* end, bool is_used) {
    const ReceiptId id = next_receipt_++;
    Receipt& own = receipts_.try_emplace(id, Receipt{.id = id, .is_used = is_used}).first->second;
    move_end(own, end);
    return id;
}

void PrefixTree::use_path(Node* end) {
    for (Node* node = end; node != nullptr; node = node->parent) node->use.last_used = now_;
}

PrefixTree::Match PrefixTree::match(std::string_view name_space, std::span<const Token> tokens,
                                    bool partial, bool use, bool whole, std::span<Page> pages) {
    if (use) tick();
    Match match;
    Node* node = root_of(name_space);
    lock(node);
    size_t most = has_other_groups() && !whole ? num_usable(*node, tokens) : tokens.size();
    while (true) {
        auto [child, common] = next_found(*node, tokens);
        common = std::min(common, most);
        if (child == nullptr || common == 0) break;
        most -= common;
        if (common < child->pages.size()) child = split(child, common);
        visit(child, use);
        std::copy(child->pages.begin(), child->pages.end(), pages.begin());
        match.num_pages[child->tier] += static_cast<int64_t>(common);
        pages = pages.subspan(common);
        tokens = tokens.subspan(common * page_size_);
        node = child;
    }
    match.receipt = give_receipt(node, use);
    if (!partial) return match;
    size_t num_tokens = 0;
    Node* tail = find_tail(*node, tokens, num_tokens);
    if (tail == nullptr) return match;
    if (tail->pages.size() > 1) tail = split(tail, 1);
    visit(tail, use);
    for (; node != nullptr; node = node->parent) lock(node);
    match.tail_page = tail->pages[0];
    match.tail_tokens = static_cast<int64_t>(num_tokens);
    match.tail_receipt = give_receipt(tail, use);
    return match;
}

// Counts a hit of every node on the path that has none at this tick.
void PrefixTree::count_hits(ReceiptId receipt, const char* operation) {
    Receipt& own = receipt_of(receipt, operation);
    own.is_used = true;
    for (Node* node = own.end; !node->is_root() && node->use.last_used < now_;
         node = node->parent) {
        node->use.last_used = now_;
        ++node->use.hits;
    }
}

void PrefixTree::use(ReceiptId receipt, ReceiptId tail_receipt) {
    receipt_of(receipt, "use");
    if (tail_receipt != kNoReceipt) receipt_of(tail_receipt, "use");
    tick();
    count_hits(receipt, "use");
    if (tail_receipt != kNoReceipt) count_hits(tail_receipt, "use");
}

PrefixTree::Found PrefixTree::peek(std::string_view name_space,
                                   std::span<const Token> tokens, bool whole) const {
    Found found{};
    const auto root = roots_.find(name_space);
    if (root == roots_.end()) return found;
    const Node* node = root->second;
    size_t most = has_other_groups() && !whole ? num_usable(*node, tokens) : tokens.size();
    while (true) {
        auto [child, common] = next_found(*node, tokens);
        common = std::min(common, most);
        if (child == nullptr || common == 0) break;
        most -= common;
        found[child->tier] += static_cast<int64_t>(common);
        if (common < child->pages.size()) break;
        tokens = tokens.subspan(common * page_size_);
        node = child;
    }
    return found;
}

// A receipt whose pages must be in the nearest tier ends at `node`, or passes through it.
void PrefixTree::check_near(const Node& node, const char* operation, ReceiptId receipt) const {
    if (node.tier == kNearest) return;
    throw TreeError(std::string(operation) + ": receipt " + std::to_string(receipt) +
                    " covers pages in tier " + std::to_string(node.tier) + "; promote it first");
}

// Copies are made by a step that is yet to run.
void PrefixTree::check_step(Step step, const char* operation) const {
    if (!is_written(step)) return;
    throw TreeError(std::string(operation) + ": step must be after the last that is done, " +
                    std::to_string(tiers_[kNearest].pool->done_step()) + ", got " +
                    std::to_string(step));
}

void PrefixTree::check_held(std::span<const Page> pages, const char* operation) const {
    const PagePool& pool = *tiers_[kNearest].pool;
    for (const Page page : pages) {
        const bool is_of_pool = page >= 0 && page < pool.num_pages();
        if (is_of_pool && pool.ref_count(page) > 0) continue;
        throw TreeError(std::string(operation) + ": page " + std::to_string(page) +
                        (is_of_pool ? " is not held" : " is not of the pool"));
    }
}

// Marks pages that the tree is about to take as its own, all or none.
void PrefixTree::claim(std::span<const Page> pages, const char* operation) {
    std::vector<uint8_t>& in_tree = tiers_[kNearest].in_tree;
    for (size_t i = 0; i < pages.size(); ++i) {
        uint8_t& mark = in_tree[static_cast<size_t>(pages[i])];
        if (mark == 0) {
            mark = 1;
            continue;
        }
        for (const Page claimed : pages.first(i)) in_tree[static_cast<size_t>(claimed)] = 0;
        throw TreeError(std::string(operation) + ": page " + std::to_string(pages[i]) +
                        " is in the tree already, or named twice");
    }
}

int64_t PrefixTree::insert(ReceiptId receipt, std::span<const Token> tokens,
                           std::span<const Page> pages, std::span<const Page> others,
                           Step step) {
    Receipt& own = receipt_of(receipt, "insert");
    if (tokens.size() != pages.size() * page_size_) {
        throw TreeError("insert: " + std::to_string(tokens.size()) + " tokens don't fill " +
                        std::to_string(pages.size()) + " pages of " + std::to_string(page_size_));
    }
    check_near(*own.end, "insert", receipt);
    size_t kept = 0;  // pages that the tree has in the nearest tier already
    const Node* last = own.end;
    while (true) {
        const auto [child, common] = next_of(*last, tokens.subspan(kept * page_size_));
        if (child == nullptr || child->tier != kNearest) break;
        kept += common;
        if (common < child->pages.size()) break;
        last = child;
    }
    const std::span<const Page> adopted = pages.subspan(kept);
    check_held(pages, "insert");
    check_group_pages(others, pages, kept, "insert");
    claim(adopted, "insert");
    tiers_[kNearest].pool->retain(adopted);

    tick();
    Node* node = own.end;
    while (true) {
        auto [child, common] = next_of(*node, tokens);
        if (child == nullptr) break;
        if (common < child->pages.size()) child = split(child, common);
        lock(child);
        if (child->tier != kNearest) {
            move_to(child, kNearest, pages.first(common), step, PagePool::kNoStep);
        }
        give_group_pages(child, 0, pages.size(), others, step);
        tokens = tokens.subspan(common * page_size_);
        pages = pages.subspan(common);
        node = child;
    }
    if (!pages.empty()) {
        // A sequence that grows is one run, of the age of its first page, and no other receipt has
        // added a page at that tick: the pages of one age are one path.
        if (own.created != node->use.created) own.created = now_;
        const NodeUse use{.created = own.created, .last_used = now_};
        node->use.last_used = now_;
        // Growing in place would let another receipt that ends here cover more.
        const bool grows = node->num_locks == 1 && node == own.end && node->children.empty() &&
                           !node->is_root() && strategy_->agree(node->use, use);
        Node* leaf = grows ? node : add_node();
        leaf->tokens.insert(leaf->tokens.end(), tokens.begin(), tokens.end());
        leaf->pages.insert(leaf->pages.end(), pages.begin(), pages.end());
        leaf->steps.insert(leaf->steps.end(), pages.size(), step);
        if (!grows) {
            leaf->use = use;
            leaf->num_locks = 1;
            attach(node, leaf);
        }
        count_pages(*leaf, 1, pages.size());
        give_group_pages(leaf, leaf->pages.size() - pages.size(), pages.size(), others, step);
        node = leaf;
    }
    if (node != own.end) move_end(own, node);
    own.is_used = true;
    use_path(node);
    return static_cast<int64_t>(adopted.size());
}

void PrefixTree::promote(ReceiptId receipt, std::span<const Page> pages,
                         std::span<const Page> others, Step step) {
    Node* const end = receipt_of(receipt, "promote").end;
    size_t num_later = 0;
    for (const Node* node = end; node->tier != kNearest; node = node->parent) {
        num_later += node->pages.size();
    }
    if (pages.size() != num_later) {
        throw TreeError("promote: receipt " + std::to_string(receipt) + " covers " +
                        std::to_string(num_later) + " pages in later tiers, got " +
                        std::to_string(pages.size()));
    }
    check_step(step, "promote");
    check_held(pages, "promote");
    check_group_pages(others, pages, 0, "promote");
    claim(pages, "promote");
    tiers_[kNearest].pool->retain(pages);
    for (Node* node = end; node->tier != kNearest; node = node->parent) {
        const size_t count = node->pages.size();
        move_to(node, kNearest, pages.last(count), step, step);
        if (!others.empty()) {
            give_group_pages(node, 0, count, others, step);
            const size_t most = count * tiers_[kNearest].num_group_pages();
            others = others.first(others.size() - std::min(most, others.size()));
        }
        pages = pages.first(pages.size() - count);
    }
}

ReceiptId PrefixTree::fork(ReceiptId receipt) {
    const Receipt& own = receipt_of(receipt, "fork");
    for (Node* node = own.end; node != nullptr; node = node->parent) lock(node);
    return give_receipt(own.end, own.is_used);
}

void PrefixTree::release(ReceiptId receipt) {
    Receipt& own = receipt_of(receipt, "release");
    Node* node = own.end;
    const bool is_used = own.is_used;
    unlink(own);
    receipts_.erase(receipt);
    if (is_used) {
        tick();
        use_path(node);
    }
    for (Node* above = node; above != nullptr; above = above->parent) unlock(above);
    // What this receipt, or the split that it caused, kept apart.
    if (can_merge(node)) node = node->children.begin()->node;
    while (!node->is_root()) node = merge_upwards(node);
    remove_if_empty(node);
}

std::vector<Page> PrefixTree::page_ids(ReceiptId receipt, int64_t first) const {
    const Node* node = receipt_of(receipt, "page_ids").end;
    const auto total = static_cast<int64_t>(node->num_above + node->pages.size());
    if (first < 0 || first > total) {
        throw TreeError("page_ids: first must be 0 to " + std::to_string(total) +
                        ", where receipt " + std::to_string(receipt) + " ends, got " +
                        std::to_string(first));
    }
    std::vector<Page> pages(static_cast<size_t>(total - first));
    for (size_t left = pages.size(); left > 0; node = node->parent) {
        check_near(*node, "page_ids", receipt);
        const size_t count = std::min(left, node->pages.size());
        left -= count;
        std::copy(node->pages.end() - static_cast<std::ptrdiff_t>(count), node->pages.end(),
                  pages.begin() + static_cast<std::ptrdiff_t>(left));
    }
    return pages;
}

int64_t PrefixTree::num_exclusive(ReceiptId receipt) const {
    int64_t count = 0;
    for (const Node* node = receipt_of(receipt, "num_exclusive").end;
         node->num_locks == 1 && !node->is_root(); node = node->parent) {
        if (node->tier == kNearest) count += static_cast<int64_t>(node->pages.size());
    }
    return count;
}

std::vector<PrefixTree::View> PrefixTree::walk() const {
    std::vector<View> views;
    for (const auto& [name_space, root] : roots_) {
        std::vector<std::pair<const Node*, int64_t>> waiting{{root, -1}};
        while (!waiting.empty()) {
            const auto [node, parent] = waiting.back();
            waiting.pop_back();
            View view{node, &name_space, parent, {}};
            for (const Receipt* receipt = node->first_receipt; receipt; receipt = receipt->next) {
                view.receipts.push_back(receipt->id);
            }
            for (auto child = node->children.rbegin(); child != node->children.rend(); ++child) {
                waiting.emplace_back(child->node, static_cast<int64_t>(views.size()));
            }
            views.push_back(std::move(view));
        }
    }
    return views;
}

}  // namespace aioserve

// How nodes come, go, split and merge, and how the books follow.

#include <utility>

#include "tree/prefix_tree.h"

namespace aioserve {

namespace {

// Leaves what follows the first `count` in `values`, and returns these.
template <class T>
std::vector<T> take_front(std::vector<T>& values, size_t count) {
    std::vector<T> rest(values.begin() + static_cast<std::ptrdiff_t>(count), values.end());
    values.resize(count);
    return std::exchange(values, std::move(rest));
}

template <class T>
void append(std::vector<T>& values, std::span<const T> more) {
    values.insert(values.end(), more.begin(), more.end());
}

}  // namespace

Node* PrefixTree::add_node() {
    nodes_.push_back(std::make_unique<Node>(page_size_));
    Node* node = nodes_.back().get();
    node->index = nodes_.size() - 1;
    return node;
}

void PrefixTree::delete_node(Node* node) {
    const size_t index = node->index;
    if (index + 1 < nodes_.size()) {
        nodes_[index] = std::move(nodes_.back());
        nodes_[index]->index = index;
    }
    nodes_.pop_back();
}

void PrefixTree::count_pages(const Node& node, int64_t sign, size_t num_pages) {
    TierBooks& books = tiers_[node.tier];
    const int64_t change = sign * static_cast<int64_t>(num_pages);
    books.num_pages += change;
    if (node.num_locks == 0) books.num_evictable += change;
}

void PrefixTree::list_or_unlist(Node* node) {
    if (!node->is_leaf() || node->num_locks > 0 || node->is_root()) {
        unlist(node);
    } else if (!node->is_listed) {
        node->listing = tiers_[node->tier].order.emplace(strategy_->key(node->use), node).first;
        node->is_listed = true;
    }
}

void PrefixTree::unlist(Node* node) {
    if (!node->is_listed) return;
    tiers_[node->tier].order.erase(node->listing);
    node->is_listed = false;
}

void PrefixTree::lock(Node* node) {
    if (node->num_locks++ > 0) return;
    tiers_[node->tier].num_evictable -= static_cast<int64_t>(node->pages.size());
    unlist(node);
}

void PrefixTree::unlock(Node* node) {
    if (--node->num_locks > 0) return;
    tiers_[node->tier].num_evictable += static_cast<int64_t>(node->pages.size());
    list_or_unlist(node);
}

void PrefixTree::attach(Node* parent, Node* node) {
    node->parent = parent;
    node->num_above = parent->num_above + parent->pages.size();
    node->place = parent->children.insert({node->tokens[0], node}).first;
    ++parent->num_children[node->tier];
    list_or_unlist(parent);
}

// `other`, whose first page has the same tokens, takes the place of `child` among its siblings.
void PrefixTree::replace(Node* child, Node* other) {
    Children& siblings = child->parent->children;
    const auto next = std::next(child->place);
    auto handle = siblings.extract(child->place);
    handle.value().node = other;
    other->place = siblings.insert(next, std::move(handle));
    other->parent = child->parent;
    other->num_above = child->num_above;
}

// Returns the parent, or null if it was a root and went too.
Node* PrefixTree::detach(Node* node) {
    Node* parent = node->parent;
    parent->children.erase(node->place);
    --parent->num_children[node->tier];
    if (parent->is_root()) return remove_if_empty(parent);
    list_or_unlist(parent);
    return parent;
}

Node* PrefixTree::remove_if_empty(Node* root) {
    if (!root->children.empty() || root->first_receipt != nullptr) return root;
    roots_.erase(roots_.find(*root->name_space));
    delete_node(root);
    return nullptr;
}

void PrefixTree::unlink(Receipt& receipt) {
    (receipt.previous ? receipt.previous->next : receipt.end->first_receipt) = receipt.next;
    if (receipt.next) receipt.next->previous = receipt.previous;
    receipt.previous = receipt.next = nullptr;
}

void PrefixTree::move_end(Receipt& receipt, Node* end) {
    if (receipt.end) unlink(receipt);
    receipt.end = end;
    receipt.next = end->first_receipt;
    if (receipt.next) receipt.next->previous = &receipt;
    end->first_receipt = &receipt;
}

// `node` keeps what follows its first `num_pages` pages; returns the new node above, with these.
Node* PrefixTree::split(Node* node, size_t num_pages) {
    Node* upper = add_node();
    upper->tokens = take_front(node->tokens, num_pages * page_size_);
    upper->pages = take_front(node->pages, num_pages);
    upper->steps = take_front(node->steps, num_pages);
    upper->tier = node->tier;
    upper->use = node->use;
    upper->num_locks = node->num_locks;
    replace(node, upper);
    node->parent = upper;
    node->num_above = upper->num_above + num_pages;
    node->place = upper->children.insert({node->tokens[0], node}).first;
    upper->num_children[node->tier] = 1;
    return upper;
}

// Whether `parent` and its only child can be one node. A receipt that ends at `parent` shows as a
// difference of locks.
bool PrefixTree::can_merge(const Node* parent) const {
    if (parent->is_root() || parent->children.size() != 1) return false;
    const Node* child = parent->children.begin()->node;
    return child->tier == parent->tier && child->num_locks == parent->num_locks &&
           strategy_->agree(child->use, parent->use) &&
           // Idle group pages and leaves go in the order of their last use.
           (!has_other_groups() || child->use.last_used == parent->use.last_used);
}

// Takes the nodes right above `node` into it where they can be merged; returns the next above.
Node* PrefixTree::merge_upwards(Node* node) {
    Node* top = node;
    while (can_merge(top->parent)) top = top->parent;
    Node* parent = top->parent;
    if (top == node) return parent;
    for (Node* next = top; next != node;) {
        Node* gone = next;
        next = next->children.begin()->node;
        append<Token>(top->tokens, next->tokens);
        append<Page>(top->pages, next->pages);
        append<Step>(top->steps, next->steps);
        if (gone != top) delete_node(gone);
    }
    node->tokens = std::move(top->tokens);
    node->pages = std::move(top->pages);
    node->steps = std::move(top->steps);
    replace(top, node);
    delete_node(top);
    return parent;
}

// The tree's references to the pages of `node` past the first `from` end here.
void PrefixTree::let_go(Node* node, size_t from, Step last_step) {
    TierBooks& books = tiers_[node->tier];
    const std::span<const Page> pages = std::span<const Page>(node->pages).subspan(from);
    if (books.num_with_group_pages > 0) {
        for (const Page page : pages) {
            if (books.pool->has_group_pages(page)) strip(node->tier, page, last_step);
        }
    }
    books.pool->release(pages, last_step);
    for (const Page page : pages) books.in_tree[static_cast<size_t>(page)] = 0;
    count_pages(*node, -1, pages.size());
}

// Puts the run of `node` into `pages` of another tier, references to which the caller hands over.
void PrefixTree::move_to(Node* node, Tier tier, std::span<const Page> pages, Step step,
                         Step last_step) {
    unlist(node);
    let_go(node, 0, last_step);
    --node->parent->num_children[node->tier];
    ++node->parent->num_children[tier];
    node->tier = tier;
    node->pages.assign(pages.begin(), pages.end());
    node->steps.assign(pages.size(), step);
    for (const Page page : pages) tiers_[tier].in_tree[static_cast<size_t>(page)] = 1;
    count_pages(*node, 1, pages.size());
    list_or_unlist(node);
    list_or_unlist(node->parent);
}

// Drops the pages of `node` from number `from` on, and all below. Receipts that ended there end
// above now, and are added to `moved`. Returns the node at whose end the path now ends, null if its
// namespace is gone.
Node* PrefixTree::drop(Node* node, size_t from, std::vector<ReceiptId>& moved) {
    Node* end = from > 0 ? node : node->parent;
    if (from > 0) {
        for (const Receipt* receipt = node->first_receipt; receipt; receipt = receipt->next) {
            moved.push_back(receipt->id);
        }
    }
    const auto end_above = [&](Node* gone) {
        while (gone->first_receipt != nullptr) {
            moved.push_back(gone->first_receipt->id);
            move_end(*gone->first_receipt, end);
        }
    };
    std::vector<Node*> below;
    for (const Child& child : node->children) below.push_back(child.node);
    for (size_t i = 0; i < below.size(); ++i) {
        for (const Child& child : below[i]->children) below.push_back(child.node);
    }
    for (Node* gone : below) {
        end_above(gone);
        unlist(gone);
        let_go(gone, 0, PagePool::kNoStep);
        delete_node(gone);
    }
    node->children.clear();
    node->num_children.fill(0);
    let_go(node, from, PagePool::kNoStep);
    if (from > 0) {
        node->tokens.resize(from * page_size_);
        node->pages.resize(from);
        node->steps.resize(from);
        list_or_unlist(node);
        return node;
    }
    end_above(node);
    unlist(node);
    Node* parent = detach(node);
    delete_node(node);
    return parent;
}

}  // namespace aioserve

// The nodes of a suffix tree: their children, the table that finds them, and the books.

#include <bit>
#include <string>

#include "drafting/scatter.h"
#include "drafting/suffix_tree.h"

namespace aioserve::drafting {

SuffixTree::NodeId SuffixTree::new_node() {
    if (first_free_ != kNone) {
        const NodeId id = first_free_;
        first_free_ = nodes_[id].parent;
        --num_free_;
        nodes_[id] = {};
        if (has_ends_) families_[id] = {};
        return id;
    }
    if (nodes_.size() >= kNone) throw DraftingError("a suffix tree has no number for a node left");
    nodes_.emplace_back();
    if (has_ends_) families_.emplace_back();
    return static_cast<NodeId>(nodes_.size() - 1);
}

void SuffixTree::delete_node(NodeId id) {
    nodes_[id] = {};
    nodes_[id].parent = first_free_;
    first_free_ = id;
    ++num_free_;
}

// The table: linear probing, half full at most, without marks of what was erased.

size_t SuffixTree::home(NodeId parent, Token token) const {
    const uint64_t key = static_cast<uint64_t>(parent) << 32 | static_cast<uint32_t>(token);
    return scattered(key) >> shift_;
}

SuffixTree::NodeId SuffixTree::child(NodeId parent, Token token) const {
    const size_t mask = table_.size() - 1;
    for (size_t place = home(parent, token);; place = (place + 1) & mask) {
        const NodeId id = table_[place];
        if (id == kNone || (nodes_[id].token == token && nodes_[id].parent == parent)) return id;
    }
}

// Where a node stands that is in the table.
size_t SuffixTree::place(NodeId id) const {
    size_t place = home(nodes_[id].parent, nodes_[id].token);
    while (table_[place] != id) place = (place + 1) & (table_.size() - 1);
    return place;
}

void SuffixTree::insert(NodeId id) {
    if (2 * num_nodes() > table_.size()) return resize(2 * table_.size());
    size_t place = home(nodes_[id].parent, nodes_[id].token);
    while (table_[place] != kNone) place = (place + 1) & (table_.size() - 1);
    table_[place] = id;
}

void SuffixTree::erase(size_t place) {
    const size_t mask = table_.size() - 1;
    for (size_t next = (place + 1) & mask; table_[next] != kNone; next = (next + 1) & mask) {
        // What may stand nearer to its home moves into the gap.
        const Node& node = nodes_[table_[next]];
        if (((next - home(node.parent, node.token)) & mask) >= ((next - place) & mask)) {
            table_[place] = table_[next];
            place = next;
        }
    }
    table_[place] = kNone;
}

// Makes the table anew, of all nodes that have a parent.
void SuffixTree::resize(size_t size) {
    table_.assign(size, kNone);
    shift_ = 64 - std::countr_zero(size);
    for (NodeId id = 1; id < nodes_.size(); ++id) {
        if (nodes_[id].depth == 0 || nodes_[id].parent == kNone) continue;
        size_t place = home(nodes_[id].parent, nodes_[id].token);
        while (table_[place] != kNone) place = (place + 1) & (size - 1);
        table_[place] = id;
    }
}

// Children

void SuffixTree::attach(NodeId parent, NodeId id) {
    nodes_[id].parent = parent;
    ++nodes_[parent].num_children;
    insert(id);
    if (!has_ends_) return;
    NodeId& first = families_[parent].first_child;
    families_[id].previous = kNone;
    families_[id].next = first;
    if (first != kNone) families_[first].previous = id;
    first = id;
}

void SuffixTree::detach(NodeId id) {
    erase(place(id));
    Node& parent = nodes_[nodes_[id].parent];
    const Family& family = families_[id];
    (family.previous == kNone ? families_[nodes_[id].parent].first_child
                              : families_[family.previous].next) = family.next;
    if (family.next != kNone) families_[family.next].previous = family.previous;
    --parent.num_children;
    if (parent.best == id) parent.best = kNone;
    nodes_[id].parent = kNone;
}

// `id`, which has no parent, becomes what `other` is to its parent.
void SuffixTree::take_place(NodeId id, NodeId other) {
    table_[place(other)] = id;
    const NodeId parent = nodes_[other].parent;
    nodes_[id].parent = parent;
    nodes_[id].token = nodes_[other].token;
    nodes_[other].parent = kNone;
    if (nodes_[parent].best == other) nodes_[parent].best = id;
    if (!has_ends_) return;
    const auto [first, next, previous] = families_[other];
    families_[id].next = next;
    families_[id].previous = previous;
    (previous == kNone ? families_[parent].first_child : families_[previous].next) = id;
    if (next != kNone) families_[next].previous = id;
}

size_t SuffixTree::num_bytes() const {
    return text_.capacity() * sizeof(Token) + occurrences_.capacity() * sizeof(Occurrence) +
           nodes_.capacity() * sizeof(Node) + families_.capacity() * sizeof(Family) +
           table_.capacity() * sizeof(NodeId);
}

// Books

namespace {

void require(bool holds, const char* what, uint32_t node) {
    if (!holds) throw DraftingError(std::string(what) + ", at node " + std::to_string(node));
}

}  // namespace

void SuffixTree::sanity_check() const {
    size_t num_free = 0;
    for (NodeId id = first_free_; id != kNone; id = nodes_[id].parent) {
        require(nodes_[id].depth == 0, "a free node is in use", id);
        ++num_free;
    }
    require(num_free == num_free_, "free nodes are counted wrong", first_free_);
    std::vector<Node> sums(nodes_.size());
    for (NodeId id = 1; id < nodes_.size(); ++id) {
        if (nodes_[id].depth == 0) continue;
        check_node(id);
        sums[nodes_[id].parent].count += nodes_[id].count;
        ++sums[nodes_[id].parent].num_children;
        if (nodes_[id].last == nodes_[nodes_[id].parent].last) sums[nodes_[id].parent].best = id;
    }
    for (NodeId id = 0; id < nodes_.size(); ++id) {
        const bool is_leaf = nodes_[id].num_children == 0;
        require(is_leaf || sums[id].count == nodes_[id].count, "windows are counted wrong", id);
        require(sums[id].num_children == nodes_[id].num_children, "children are counted wrong", id);
        if (nodes_[id].depth == 0) continue;
        require(is_leaf || sums[id].best != kNone, "no child has the last window", id);
        if (!has_ends_) continue;
        uint32_t listed = 0;
        for (NodeId child = families_[id].first_child; child != kNone; ++listed) {
            require(nodes_[child].parent == id, "another's child is listed", id);
            child = families_[child].next;
        }
        require(listed == nodes_[id].num_children, "children are not listed", id);
    }
    size_t num_found = 0;
    for (const NodeId id : table_) num_found += id != kNone;
    require(num_found == num_nodes() - 1, "the table has another number of nodes", kRoot);
}

// A node that is not the root, and how it stands to its parent.
void SuffixTree::check_node(NodeId id) const {
    const Node& node = nodes_[id];
    const Node& parent = nodes_[node.parent];
    require(parent.depth < node.depth, "a child is no deeper than its parent", id);
    require(child(node.parent, node.token) == id, "a child is not found", id);
    require(node.count > 0 && index(node.last) < text_.size(), "a node has no window", id);
    require(at(node.last + parent.depth) == node.token, "an edge has another text", id);
    if (node.parent != kRoot) {
        const Node& best = nodes_[parent.best];
        require(best.parent == node.parent && best.count >= node.count, "another is better", id);
        require(best.count > node.count || parent.best == id || is_later(best.last, node.last),
                "another is as good, and came later", id);
        require(parent.last == node.last || is_later(parent.last, node.last),
                "another window came later", id);
    }
    require(node.num_children != 1, "a node has one child", id);
    require((node.num_children == 0) == (node.link == kNone), "a leaf has a link, or a node none",
            id);
    if (node.num_children == 0) return;
    const Node& link = nodes_[node.link];
    require(link.depth == node.depth - 1 && (link.depth > 0 || node.link == kRoot),
            "a link is to another depth", id);
    for (uint32_t i = 0; i < link.depth; ++i)
        require(at(link.last + i) == at(node.last + 1 + i), "a link is to another text", id);
}

}  // namespace aioserve::drafting

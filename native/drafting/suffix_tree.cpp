#include "drafting/suffix_tree.h"

#include <algorithm>
#include <bit>

namespace aioserve::drafting {

SuffixTree::SuffixTree(uint32_t max_depth, bool has_ends)
    : max_depth_(max_depth), has_ends_(has_ends), nodes_(1) {
    if (has_ends) families_.resize(1);
    resize(16);
}

void SuffixTree::reserve(size_t num_tokens) {
    text_.reserve(text_.size() + num_tokens);
    // All that there can be, of which the system provides what is used. In the table, which is
    // written at once, as many as code and prose have.
    nodes_.reserve(nodes_.size() + 2 * num_tokens);
    const size_t num_nodes = nodes_.size() + num_tokens + num_tokens / 2;
    if (2 * num_nodes > table_.size()) resize(std::bit_ceil(2 * num_nodes));
}

uint32_t SuffixTree::depth_of_window(Position start) const {
    if (!has_ends_) return max_depth_;
    return std::min<uint32_t>(max_depth_, end_of_sequence_ - start);
}

// Searches

// Whether `token` follows; if so, goes on behind it.
bool SuffixTree::step(Match& match, Token token) const {
    const Node& node = nodes_[match.node];
    if (match.length == node.depth) {
        const NodeId next = child(match.node, token);
        if (next == kNone) return false;
        match.node = next;
    } else if (at(node.last + match.length) != token) {
        return false;
    }
    ++match.length;
    return true;
}

// The match without its first token. `end` is behind its last one.
SuffixTree::Match SuffixTree::suffix(const Match& match, const Token* end) const {
    const uint32_t length = match.length - 1;
    const Node& node = nodes_[match.node];
    if (match.length == node.depth && node.link != kNone) return {node.link, length};
    NodeId below = nodes_[node.parent].link;
    if (node.parent == kRoot) below = kRoot;
    while (nodes_[below].depth < length)
        below = child(below, *(end - (length - nodes_[below].depth)));
    return {below, length};
}

void SuffixTree::follow(Match& match, const Token* end) const {
    while (!step(match, end[-1])) {
        if (match.length == 0) return;
        match = suffix(match, end - 1);
    }
}

Draft SuffixTree::draft_behind(const Match& match, size_t num_tokens,
                               double min_probability) const {
    Draft draft;
    draft.tokens.reserve(num_tokens);
    double probability = 1;
    NodeId id = match.node;
    for (uint32_t length = match.length; draft.tokens.size() < num_tokens; ++length) {
        if (length == nodes_[id].depth && nodes_[id].best != kNone) {
            const NodeId best = nodes_[id].best;
            probability *= static_cast<double>(nodes_[best].count) / nodes_[id].count;
            if (probability < min_probability) break;
            id = best;
        }
        // Behind a leaf as its last window goes on, and from the end of the text into the draft.
        const size_t place = index(nodes_[id].last + length);
        const Token token =
            place < text_.size() ? text_[place] : draft.tokens[place - text_.size()];
        if (token < 0) break;
        draft.tokens.push_back(token);
        draft.expected += probability;
    }
    return draft;
}

void SuffixTree::draft(Match match, const Token* end, const DraftLimits& limits,
                       Draft& best) const {
    uint32_t count = 0;
    for (; match.length > 0; match = suffix(match, end)) {
        const double most =
            std::min(static_cast<double>(limits.tokens), limits.factor * match.length);
        if (most < 1 || most <= best.expected) return;
        // A suffix that stands nowhere else is followed by the same.
        if (nodes_[match.node].count == count) continue;
        count = nodes_[match.node].count;
        Draft draft = draft_behind(match, static_cast<size_t>(most), limits.min_probability);
        if (draft.expected > best.expected) best = std::move(draft);
    }
}

// Growth

void SuffixTree::append(Token token) {
    if (has_ends_) throw DraftingError("append is for one sequence, which grows");
    grow(token);
}

SuffixTree::Position SuffixTree::add(std::span<const Token> tokens) {
    if (!has_ends_) throw DraftingError("add is for whole sequences");
    const Position start = end();
    end_of_sequence_ = start + static_cast<Position>(tokens.size()) + 1;
    for (const Token token : tokens) grow(token);
    grow(kEnd);
    if (active_.length != 0) throw DraftingError("a sequence ended before its windows did");
    return start;
}

void SuffixTree::grow(Token token) {
    if (has_ends_) occurrences_.push_back({.older = end(), .newer = end()});
    text_.push_back(token);
    NodeId unlinked = kNone;
    while (!step(active_, token)) {
        NodeId parent = active_.node;
        const bool is_inside = active_.length < nodes_[parent].depth;
        if (is_inside) parent = split(active_);
        if (unlinked != kNone) nodes_[unlinked].link = parent;
        unlinked = is_inside ? parent : kNone;
        const Position start = end() - 1 - active_.length;
        count(add_leaf(parent, token, start), start);
        if (active_.length == 0) return;
        active_ = suffix({parent, active_.length}, &text_.back());
    }
    // The match stood at a node before this token, which has two children at least.
    if (unlinked != kNone) nodes_[unlinked].link = nodes_[active_.node].parent;
    while (count_if_whole()) active_ = suffix(active_, text_.data() + text_.size());
}

// Counts the active match where it is all of a window.
bool SuffixTree::count_if_whole() {
    const Node& node = nodes_[active_.node];
    if (active_.length < node.depth || node.num_children > 0 || active_.length == 0) return false;
    count(active_.node, end() - active_.length);
    return true;
}

// A node at the end of `match`, which is inside an edge.
SuffixTree::NodeId SuffixTree::split(const Match& match) {
    const NodeId id = new_node();
    Node& node = nodes_[id];
    Node& below = nodes_[match.node];
    node.depth = match.length;
    node.count = below.count;
    node.last = below.last;
    take_place(id, match.node);
    below.token = at(below.last + match.length);
    attach(id, match.node);
    node.best = match.node;
    return id;
}

SuffixTree::NodeId SuffixTree::add_leaf(NodeId parent, Token token, Position start) {
    const NodeId id = new_node();
    nodes_[id].token = token;
    nodes_[id].depth = depth_of_window(start);
    attach(parent, id);
    return id;
}

// One window more that ends at `leaf`, later than all others.
void SuffixTree::count(NodeId leaf, Position start) {
    if (has_ends_) remember(leaf, start);
    NodeId id = leaf;
    for (; id != kRoot; id = nodes_[id].parent) {
        Node& node = nodes_[id];
        ++node.count;
        node.last = start;
        if (node.parent == kRoot) continue;
        NodeId& best = nodes_[node.parent].best;
        if (best != id && (best == kNone || node.count >= nodes_[best].count)) best = id;
    }
    ++nodes_[kRoot].count;
}

void SuffixTree::remember(NodeId leaf, Position start) {
    if (nodes_[leaf].count == 0) return;
    occurrences_[index(start)].older = nodes_[leaf].last;
    occurrences_[index(nodes_[leaf].last)].newer = start;
}

// Removal

void SuffixTree::remove(Position start, size_t length) {
    if (!has_ends_) throw DraftingError("remove is for whole sequences");
    end_of_sequence_ = start + static_cast<Position>(length) + 1;
    // In this order a node is linked to one that stays as long.
    for (Position window = start; window != end_of_sequence_; ++window) remove_window(window);
}

void SuffixTree::remove_window(Position start) {
    NodeId id = kRoot;
    for (const uint32_t depth = depth_of_window(start); nodes_[id].depth < depth;) {
        id = child(id, at(start + nodes_[id].depth));
        if (id == kNone) throw DraftingError("a window to remove is not in the tree");
    }
    const auto [older, newer] = occurrences_[index(start)];
    if (older != start) occurrences_[index(older)].newer = newer == start ? older : newer;
    if (newer != start) occurrences_[index(newer)].older = older == start ? newer : older;
    if (nodes_[id].last == start) nodes_[id].last = older;

    // `id` is the child that has lost a window, of nodes that are to lose it.
    NodeId parent = nodes_[id].parent;
    if (--nodes_[id].count == 0) {
        detach(id);
        delete_node(id);
        id = kNone;
    }
    for (; parent != kRoot; parent = nodes_[id].parent) {
        Node& node = nodes_[parent];
        --node.count;
        if (node.num_children == 1) {
            const NodeId only = families_[parent].first_child;
            detach(only);
            nodes_[only].token = node.token;
            take_place(only, parent);
            delete_node(parent);
            id = only;
            continue;
        }
        if (node.last == start || node.best == id) look_again(parent);
        id = parent;
    }
    --nodes_[kRoot].count;
}

// Which of the children is best, and which window came last.
void SuffixTree::look_again(NodeId parent) {
    Node& node = nodes_[parent];
    node.best = families_[parent].first_child;
    node.last = nodes_[node.best].last;
    for (NodeId id = families_[node.best].next; id != kNone; id = families_[id].next) {
        const Node& other = nodes_[id];
        const Node& best = nodes_[node.best];
        if (is_later(other.last, node.last)) node.last = other.last;
        if (other.count > best.count ||
            (other.count == best.count && is_later(other.last, best.last)))
            node.best = id;
    }
}

void SuffixTree::forget_before(Position start) {
    // Now and then, so that each token is moved once on average.
    const size_t num_tokens = index(start);
    if (num_tokens == 0 || num_tokens < text_.size() - num_tokens) return;
    text_.erase(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(num_tokens));
    occurrences_.erase(occurrences_.begin(),
                       occurrences_.begin() + static_cast<std::ptrdiff_t>(num_tokens));
    base_ = start;
}

}  // namespace aioserve::drafting

// What followed the last tokens of a sequence wherever they stood before, and how often.
//
// Knows token ids and positions. Knows nothing of slots, namespaces, Python or threads: one caller at
// a time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <vector>

namespace aioserve::drafting {

using Token = int32_t;

// Stands behind a sequence that has ended. Token ids aren't negative, so no search finds it.
inline constexpr Token kEnd = -1;
// Stands before an answer, so that how answers begin is found as well.
inline constexpr Token kStart = -2;

// The caller broke the rules, or the books don't balance: a bug.
class DraftingError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

struct DraftLimits {
    size_t tokens;           // at most so many,
    double factor;           // and at most so many for each token of the match
    double min_probability;  // of the whole draft
};

struct Draft {
    std::vector<Token> tokens;
    double expected = 0;  // how many of them come true, if counts are probabilities
};

// A suffix tree cut off at `max_depth` tokens, the windows of its texts, which grows at its end in the
// manner of Ukkonen (1995), with the cut of Na et al., "Truncated suffix trees and their application
// to data compression" (2003):
//
//      text  a b c a b d a b       the window at each position: its token and those behind it
//
//      root ── a b ──┬── c a b d..       count 1
//                    └── d a b           count 1
//           ── b ──┬── c a b d..         inner nodes have two children or more, so there
//                  └── d a b             are fewer of them than leaves
//           ── ..
//
// The last tokens, as far as they stood before, make up the *active* match ("a b" here). Windows that
// begin in it are counted once they differ from all before, are `max_depth` long, or have ended.
//
// A node knows its text by the last window that goes through it. So what lies above a window that
// goes has either another text or no use any more.
class SuffixTree {
  public:
    using NodeId = uint32_t;
    using Position = uint32_t;  // in the text; they wrap around

    // Where a search has got to: `length` tokens below the root, on the edge to `node` or at its end.
    struct Match {
        NodeId node = 0;
        uint32_t length = 0;
    };

    // `has_ends`: made of sequences that come and go whole, by `add` and `remove`. Otherwise of one,
    // which grows by `append`.
    SuffixTree(uint32_t max_depth, bool has_ends);

    void reserve(size_t num_tokens);
    void append(Token token);
    // Adds a sequence, and kEnd behind it. Returns where it stands.
    Position add(std::span<const Token> tokens);
    // Removes a sequence of `length` tokens without its kEnd.
    void remove(Position start, size_t length);
    // Drops the text before `start`, whose sequences have all been removed.
    void forget_before(Position start);

    // The longest suffix of the sequence that stood in it before, of less than max_depth tokens.
    const Match& active() const { return active_; }
    // Takes `match` on to the longest suffix that ends before `end` and stands here, one token more.
    void follow(Match& match, const Token* end) const;
    // Replaces `best` by what follows `match`, or a suffix of it, where more is expected of that.
    void draft(Match match, const Token* end, const DraftLimits& limits, Draft& best) const;
    // What follows `match` alone, whatever its length.
    Draft draft_behind(const Match& match, size_t num_tokens, double min_probability) const;

    std::span<const Token> text() const { return text_; }
    std::span<const Token> text(Position start, size_t length) const {
        return std::span(text_).subspan(index(start), length);
    }
    Position end() const { return base_ + static_cast<Position>(text_.size()); }
    size_t num_nodes() const { return nodes_.size() - num_free_; }
    size_t num_bytes() const;
    // Recounts everything; throws where something is off.
    void sanity_check() const;

  private:
    static constexpr NodeId kRoot = 0;
    static constexpr NodeId kNone = std::numeric_limits<NodeId>::max();
    // Positions wrap around soon, so that this is nothing that happens once in a year.
    static constexpr Position kFirst = std::numeric_limits<Position>::max() - 30;

    struct alignas(32) Node {
        NodeId parent = kNone;  // of a node that is free: the next free one
        Token token = 0;        // the first of the edge
        uint32_t depth = 0;     // at the end of the edge; 0 at the root, and where a node is free
        uint32_t count = 0;     // windows that go through
        Position last = 0;      // the last of them
        NodeId link = kNone;    // the node without the first token; none at leaves
        // The child with the highest count, of equals the one that came last; none at leaves, and at
        // the root, since nothing is drafted behind no match.
        NodeId best = kNone;
        uint32_t num_children = 0;
    };
    // Where there are ends. Without removals no node asks for all of its children.
    struct Family {
        NodeId first_child = kNone, next = kNone, previous = kNone;
    };
    // The next windows with the same text on either side, or itself.
    struct Occurrence {
        Position older, newer;
    };

    size_t index(Position position) const { return static_cast<Position>(position - base_); }
    Token at(Position position) const { return text_[index(position)]; }
    uint32_t depth_of_window(Position start) const;
    bool is_later(Position left, Position right) const { return index(left) > index(right); }

    // suffix_tree.cpp
    NodeId child(NodeId node, Token token) const;
    bool step(Match& match, Token token) const;
    Match suffix(const Match& match, const Token* end) const;
    void grow(Token token);
    bool count_if_whole();
    NodeId split(const Match& match);
    NodeId add_leaf(NodeId parent, Token token, Position start);
    void count(NodeId leaf, Position start);
    void remember(NodeId leaf, Position start);
    void remove_window(Position start);
    void look_again(NodeId parent);

    // nodes.cpp: children and the table that finds them
    NodeId new_node();
    void delete_node(NodeId id);
    size_t home(NodeId parent, Token token) const;
    size_t place(NodeId id) const;
    void insert(NodeId id);
    void erase(size_t place);
    void resize(size_t size);
    void attach(NodeId parent, NodeId id);
    void detach(NodeId id);
    void take_place(NodeId id, NodeId other);
    void check_node(NodeId id) const;

    uint32_t max_depth_;
    bool has_ends_;
    std::vector<Token> text_;
    std::vector<Occurrence> occurrences_;  // of the same window, by position, where there are ends
    Position base_ = kFirst;               // of the first token of the text
    Position end_of_sequence_ = 0;         // which is being added
    Match active_;
    std::vector<Node> nodes_;
    std::vector<Family> families_;  // by node
    NodeId first_free_ = kNone;
    size_t num_free_ = 0;
    std::vector<NodeId> table_;  // children by parent and token; open addressing
    int shift_;
};

}  // namespace aioserve::drafting

// A node of the prefix tree: a run of tokens, the pages that hold their KV, and what hangs below.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pool/page_pool.h"
#include "tree/strategy.h"

namespace aioserve {

using Token = int32_t;
using Page = PagePool::Page;
using Step = PagePool::Step;
using ReceiptId = int64_t;

// The number of a storage that pages are in, nearest first.
using Tier = uint8_t;
constexpr Tier kNearest = 0;  // steps compute in its pages
constexpr size_t kMostTiers = 4;

struct Node;

// A node among its siblings. Most differ in the first token, which spares a look at their runs.
struct Child {
    Token first;
    Node* node;
};

// Orders siblings by the tokens of their first page, so that the sibling with the longest common
// prefix is a neighbour of where a query would stand. A query may be shorter than a page.
struct FirstPageLess {
    using is_transparent = void;
    using Tokens = std::span<const Token>;

    size_t page_size;

    bool operator()(const Child& left, const Child& right) const {
        if (left.first != right.first) return left.first < right.first;
        return less(first_page(left), first_page(right));
    }
    bool operator()(const Child& left, Tokens right) const {
        if (right.empty()) return false;
        if (left.first != right[0]) return left.first < right[0];
        return less(first_page(left), right);
    }
    bool operator()(Tokens left, const Child& right) const {
        if (left.empty()) return true;
        if (left[0] != right.first) return left[0] < right.first;
        return less(left, first_page(right));
    }

  private:
    inline Tokens first_page(const Child& child) const;

    static bool less(Tokens left, Tokens right) {
        return std::lexicographical_compare(left.begin(), left.end(), right.begin(), right.end());
    }
};

using Children = std::set<Child, FirstPageLess>;
using EvictionOrder = std::set<std::pair<EvictionStrategy::Key, Node*>>;

// A lock on the path from the root of a namespace down to the end of `end`, where it hangs in a
// list of its node's.
struct Receipt {
    ReceiptId id;
    bool is_used = false;  // its release counts as a use of the path
    int64_t created = -1;  // of the run that it added last
    Node* end = nullptr;
    Receipt* previous = nullptr;
    Receipt* next = nullptr;
};

struct Node {
    explicit Node(size_t page_size) : children(FirstPageLess{page_size}) {}

    bool is_root() const { return parent == nullptr; }
    // Whether all below is in later tiers.
    bool is_leaf() const { return num_children[tier] == 0; }

    // What a match touches, side by side.
    Children children;
    std::vector<Token> tokens;  // page_size for each page
    std::vector<Page> pages;    // none at a root
    int64_t num_locks = 0;      // receipts that end here or below
    NodeUse use;
    Tier tier = kNearest;
    bool is_listed = false;  // for eviction

    Node* parent = nullptr;
    std::vector<Step> steps;                         // that writes each page
    size_t num_above = 0;                            // pages on the path above
    std::array<int64_t, kMostTiers> num_children{};  // in each tier
    Receipt* first_receipt = nullptr;
    Children::iterator place;                 // among the parent's children
    EvictionOrder::iterator listing;          // where listed
    const std::string* name_space = nullptr;  // of a root
    size_t index = 0;                         // among the tree's nodes
};

FirstPageLess::Tokens FirstPageLess::first_page(const Child& child) const {
    return {child.node->tokens.data(), page_size};
}

// How many of the first tokens of `left` and `right` are equal.
size_t common_prefix(std::span<const Token> left, std::span<const Token> right);

}  // namespace aioserve

// Which runs of tokens have their KV in pages: a compressed radix tree per namespace.
//
// Knows token ids, page numbers and step numbers. Knows nothing of tensors, Python, clocks or
// threads: one caller at a time.

#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pool/page_pool.h"
#include "tree/node.h"
#include "tree/strategy.h"

namespace aioserve {

// The caller broke the tree's rules, or the tree's books don't balance: a bug.
class TreeError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// The tree of RadixAttention (Zheng et al., arXiv 2312.07104, section 3.1) over the pages of
// PagedAttention (Kwon et al., arXiv 2309.06180), in one tier or several:
//
//      root of a namespace
//        |
//      [a b c d | e f g h]  pages 3, 7             tier 0, 2 receipts pass through
//        |            \                            .
//      [i j k l]     [m n o p | q r s t]           leaf of tier 0: evicted page by page from its end
//        |  ^ receipt     \                        .
//        .               [u v w x]  page 0         tier 1: below it all is in tier 1 or later ones
//
// Invariants, which `sanity_check` recounts:
//   - A node holds whole pages, at least one, all in one tier, and what is below it is in that tier
//     or later ones; a root holds none and lives while it has children or receipts.
//   - Siblings differ within their first page.
//   - The tree has one reference to each page in it. A page with further holders is locked by them.
//   - A receipt locks every node from the root to the node at whose end it ends. A split makes a
//     new upper node with the locks and the use of the lower, which keeps identity and receipts.
//   - A node is no younger than those below it, and was used no earlier and no less often.
//   - Listed for eviction is exactly what has no locks and no child in its tier.
//
// The pages of a node are those of group 0. The pages that other groups have of the same tokens are
// its group pages in the pool (`PagePool::attach`). The tree attaches and detaches them; they come
// and go with the page, and go before it where the pool says that nobody uses them. A page may lack
// them. What a match is to go on from needs them for the last tokens alone.
//
// Nodes are a compression and nothing else: pages are used, locked, moved and evicted as if each
// had a node of its own. Where an only child agrees with its parent in tier, locks and strategy
// key, the two are merged, so that chains don't grow with the chunks that made them.
//
// Every operation either happens whole or throws and changes nothing, unless somebody has taken the
// tree's own references from a pool.
class PrefixTree {
  public:
    static constexpr ReceiptId kNoReceipt = -1;
    static constexpr Page kNoPage = -1;

    using Found = std::array<int64_t, kMostTiers>;  // pages in each tier
    struct Match {
        ReceiptId receipt = kNoReceipt;
        Found num_pages{};
        Page tail_page = kNoPage;
        int64_t tail_tokens = 0;
        ReceiptId tail_receipt = kNoReceipt;
    };
    // A page whose KV moves to the next tier.
    struct Move {
        Tier tier;  // of `source`
        Page source;
        Page target;
    };
    struct Evicted {
        int64_t count = 0;        // of the tier's pages, group pages included
        std::vector<Move> moves;  // in order; each target once
    };
    struct Shortened {
        ReceiptId receipt;
        int64_t num_pages;  // that it still covers

        auto operator<=>(const Shortened&) const = default;
    };
    // A node as `walk` shows it.
    struct View {
        const Node* node;
        const std::string* name_space;
        int64_t parent;  // its place in the walk, -1 of a root
        std::vector<ReceiptId> receipts;
    };

    // `pools` are those of the tiers, nearest first, at most `kMostTiers`. They must outlive the
    // tree's use. Where their pages have group pages, a token needs those of the last
    // `needed_tokens` tokens, its own included.
    PrefixTree(const std::vector<PagePool*>& pools, std::unique_ptr<EvictionStrategy> strategy,
               int64_t needed_tokens = 1);

    // Writes the matched pages to `pages`, which has room for all whole pages of `tokens`. With
    // `whole` also what lacks group pages that the next token needs.
    Match match(std::string_view name_space, std::span<const Token> tokens, bool partial, bool use,
                bool whole, std::span<Page> pages);
    void use(ReceiptId receipt, ReceiptId tail_receipt);
    Found peek(std::string_view name_space, std::span<const Token> tokens, bool whole) const;
    // `others` are group pages for the last of `pages`.
    int64_t insert(ReceiptId receipt, std::span<const Token> tokens, std::span<const Page> pages,
                   std::span<const Page> others, Step step);
    void promote(ReceiptId receipt, std::span<const Page> pages, std::span<const Page> others,
                 Step step);
    ReceiptId fork(ReceiptId receipt);
    void release(ReceiptId receipt);

    Evicted evict(Tier tier, int64_t count, Step step);
    bool frees_at_once(int64_t count);
    void clear();
    std::vector<Shortened> withdraw(Step step);
    std::vector<Shortened> cut(ReceiptId receipt, int64_t num_pages);

    // The pages of the path from number `first` on, all of the nearest tier.
    std::vector<Page> page_ids(ReceiptId receipt, int64_t first) const;
    int64_t num_exclusive(ReceiptId receipt) const;
    size_t page_size() const { return page_size_; }
    // Group pages included.
    int64_t pages_of(Tier tier) const;
    int64_t evictable_of(Tier tier) const;
    int64_t num_pages() const { return pages_of(kNearest); }
    int64_t num_evictable() const { return evictable_of(kNearest); }
    size_t num_tiers() const { return tiers_.size(); }
    int64_t num_nodes() const { return static_cast<int64_t>(nodes_.size()); }
    int64_t num_receipts() const { return static_cast<int64_t>(receipts_.size()); }

    std::span<const Page> group_pages(const Node& node, Page page) const {
        return tiers_[node.tier].pool->group_pages(page);
    }
    // Parents before their children, siblings in order.
    std::vector<View> walk() const;
    // Recounts everything; throws with every term that is off.
    void sanity_check() const;

  private:
    using Key = EvictionStrategy::Key;

    struct TierBooks {
        PagePool* pool = nullptr;
        std::vector<uint8_t> in_tree;  // by page
        EvictionOrder order;
        int64_t num_pages = 0;      // without group pages
        int64_t num_evictable = 0;  // on nodes without locks
        int64_t num_with_group_pages = 0;

        size_t num_group_pages() const { return static_cast<size_t>(pool->num_group_pages()); }
    };

    struct Next {
        Node* node;        // null if no child begins with the next page
        size_t num_pages;  // of its run that are the next
    };

    // prefix_tree.cpp
    Receipt& receipt_of(ReceiptId receipt, const char* operation);
    const Receipt& receipt_of(ReceiptId receipt, const char* operation) const;
    Node* root_of(std::string_view name_space);
    Next next_of(const Node& node, std::span<const Token> tokens) const;
    Next next_found(const Node& node, std::span<const Token> tokens) const;
    Node* find_tail(const Node& node, std::span<const Token> tokens, size_t& num_tokens) const;
    bool is_written(Step step) const { return step <= tiers_[kNearest].pool->done_step(); }
    bool has_next(Tier tier) const { return tier + size_t{1} < tiers_.size(); }
    void check_near(const Node& node, const char* operation, ReceiptId receipt) const;
    void tick();
    void visit(Node* node, bool use);
    void count_hits(ReceiptId receipt, const char* operation);
    ReceiptId give_receipt(Node* end, bool is_used);
    void use_path(Node* end);
    void check_step(Step step, const char* operation) const;
    void check_held(std::span<const Page> pages, const char* operation) const;
    void claim(std::span<const Page> pages, const char* operation);

    // shape.cpp: what keeps the books while nodes change
    Node* add_node();
    void delete_node(Node* node);
    void lock(Node* node);
    void unlock(Node* node);
    void list_or_unlist(Node* node);
    void unlist(Node* node);
    void count_pages(const Node& node, int64_t sign, size_t num_pages);
    void attach(Node* parent, Node* node);
    void replace(Node* child, Node* other);
    Node* detach(Node* node);
    void move_end(Receipt& receipt, Node* end);
    void unlink(Receipt& receipt);
    Node* split(Node* node, size_t num_pages);
    bool can_merge(const Node* parent) const;
    Node* merge_upwards(Node* node);
    Node* remove_if_empty(Node* root);
    void let_go(Node* node, size_t from, Step last_step);
    void move_to(Node* node, Tier tier, std::span<const Page> pages, Step step, Step last_step);
    Node* drop(Node* node, size_t from, std::vector<ReceiptId>& moved);

    // group_pages.cpp
    bool has_other_groups() const { return tiers_[kNearest].num_group_pages() > 0; }
    bool lacks_group_pages(const Node& node, size_t index) const;
    size_t first_needed(size_t num_pages) const;
    size_t num_usable(const Node& root, std::span<const Token> tokens) const;
    std::span<const Page> group_pages_of(std::span<const Page> others, size_t num_pages,
                                         size_t index) const;
    void check_group_pages(std::span<const Page> others, std::span<const Page> pages,
                           size_t num_kept, const char* operation) const;
    void give_group_pages(Node* node, size_t first, size_t num_pages, std::span<const Page> others,
                      Step step);
    void attach(Tier tier, Page owner, std::span<const Page> others);
    void strip(Tier tier, Page owner, Step last_step);
    bool strip_goes_first(Tier tier);
    void strip_first(Tier tier);
    int64_t size_of_tail(const Node& leaf, size_t num_pages) const;
    size_t tail_that_frees(const Node& leaf, int64_t count) const;
    bool make_room_for_tail(const Node& leaf, Step step, Evicted& evicted);

    // evict.cpp
    const EvictionOrder& order_of(Tier tier);
    void drop_tail(Node* leaf, size_t num_pages);
    int64_t evict_from(Tier tier, int64_t count, Step step, Evicted& evicted);
    size_t give_up_tail(Node* leaf, size_t wanted, Step step, Evicted& evicted);
    size_t make_room(const Node& leaf, size_t wanted, Step step, Evicted& evicted);
    size_t room_for(const Node& leaf, size_t wanted, Step step, Evicted& evicted);
    void demote(Node* leaf, size_t num_pages, Step step, Evicted& evicted);
    void forget_overwritten(Evicted& evicted);
    bool is_touched(std::span<const Page> pages) const;
    void drop_and_list(Node* node, size_t from, int64_t num_pages, std::vector<Shortened>& list);

    // sanity_check.cpp
    struct Recount;
    void recount_receipts(const std::vector<View>& views, Recount& recount) const;
    void recount_node(const View& view, Recount& recount) const;
    void recount_children(const Node& node, Recount& recount) const;
    void recount_pages(const Node& node, Recount& recount) const;
    void recount_group_pages(const Node& node, Page owner, Recount& recount) const;

    size_t page_size_ = 0;
    size_t needed_tokens_ = 1;
    std::unique_ptr<EvictionStrategy> strategy_;
    bool is_relisted_ = false;  // since the strategy has changed
    std::vector<TierBooks> tiers_;  // nearest first
    int64_t now_ = 0;  // ticks with every use
    ReceiptId next_receipt_ = 0;
    std::vector<std::unique_ptr<Node>> nodes_;
    std::map<std::string, Node*, std::less<>> roots_;
    std::unordered_map<ReceiptId, Receipt> receipts_;
};

}  // namespace aioserve

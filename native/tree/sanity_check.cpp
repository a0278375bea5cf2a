// The tree against a recount of itself.

#include <sstream>
#include <unordered_map>

#include "tree/prefix_tree.h"

namespace aioserve {

// What a walk finds, and every term in which the tree's own books differ.
struct PrefixTree::Recount {
    struct Counts {
        int64_t num_pages = 0;
        int64_t num_evictable = 0;
        int64_t num_idle = 0;  // pages whose group pages nobody uses
        int64_t num_with_group_pages = 0;
        size_t num_listed = 0;
        std::vector<uint8_t> in_tree;
    };
    std::ostringstream wrong;
    std::vector<Counts> tiers;
    std::unordered_map<const Node*, int64_t> locks;
};

namespace {

std::string name_of(const Node& node) {
    if (node.is_root()) return "a root";
    return "the node of tier " + std::to_string(node.tier) + " with page " +
           (node.pages.empty() ? "none" : std::to_string(node.pages[0]));
}

}  // namespace

void PrefixTree::recount_receipts(const std::vector<View>& views, Recount& recount) const {
    size_t num_ends = 0;
    for (const View& view : views) {
        for (const ReceiptId id : view.receipts) {
            ++num_ends;
            const auto found = receipts_.find(id);
            if (found == receipts_.end() || found->second.end != view.node) {
                recount.wrong << "; receipt " << id << " is listed where it doesn't end";
            }
            for (const Node* node = view.node; node; node = node->parent) ++recount.locks[node];
        }
    }
    if (num_ends != receipts_.size()) {
        recount.wrong << "; " << num_ends << " of " << receipts_.size()
                      << " receipts end in the tree";
    }
}

void PrefixTree::recount_node(const View& view, Recount& recount) const {
    std::ostringstream& wrong = recount.wrong;
    const Node& node = *view.node;
    const std::string name = name_of(node);
    const size_t size = node.pages.size();
    if (node.is_root() != (view.parent < 0) || node.is_root() != (size == 0)) {
        wrong << "; " << name << " of " << size << " pages is out of place";
    }
    if (node.is_root() && node.children.empty() && view.receipts.empty()) {
        wrong << "; the empty namespace '" << *view.name_space << "' is kept";
    }
    if (node.tokens.size() != size * page_size_ || node.steps.size() != size) {
        wrong << "; " << name << " has " << node.tokens.size() << " tokens and "
              << node.steps.size() << " steps for " << size << " pages";
    }
    const size_t num_above =
        node.is_root() ? 0 : node.parent->num_above + node.parent->pages.size();
    if (node.num_above != num_above) {
        wrong << "; " << name << " counts " << node.num_above << " of " << num_above
              << " pages above";
    }
    const int64_t locks = recount.locks[&node];
    if (node.num_locks != locks) {
        wrong << "; " << name << " has " << node.num_locks << " locks for " << locks
              << " receipts";
    }
    const bool is_listed = node.is_leaf() && locks == 0 && !node.is_root();
    if (is_listed != node.is_listed) {
        wrong << "; " << name << (is_listed ? " isn't" : " is") << " listed for eviction";
    } else if (is_listed && (!strategy_->gives(node.listing->first, node.use) ||
                             node.listing->second != &node)) {
        wrong << "; " << name << " is listed under another key";
    }
    Recount::Counts& counts = recount.tiers[node.tier];
    counts.num_pages += static_cast<int64_t>(size);
    counts.num_evictable += locks == 0 ? static_cast<int64_t>(size) : 0;
    counts.num_listed += is_listed ? 1 : 0;
}

void PrefixTree::recount_children(const Node& node, Recount& recount) const {
    std::ostringstream& wrong = recount.wrong;
    const std::string name = name_of(node);
    std::array<int64_t, kMostTiers> num_children{};
    const Child* previous = nullptr;
    for (const Child& entry : node.children) {
        const Node* child = entry.node;
        const std::string child_name = name_of(*child);
        if (child->parent != &node || &*child->place != &entry || entry.first != child->tokens[0]) {
            wrong << "; " << child_name << " has another parent or place";
        }
        ++num_children[child->tier];
        if (child->tier < node.tier) {
            wrong << "; " << child_name << " is below " << name;
        }
        if (previous != nullptr && !node.children.key_comp()(*previous, entry)) {
            wrong << "; " << child_name << " is out of order or like its sibling";
        }
        if (!node.is_root() && (child->use.created < node.use.created ||
                                child->use.last_used > node.use.last_used ||
                                child->use.hits > node.use.hits)) {
            wrong << "; " << child_name << " is older than " << name << " or was used more";
        }
        previous = &entry;
    }
    for (size_t tier = 0; tier < kMostTiers; ++tier) {
        if (num_children[tier] == node.num_children[tier]) continue;
        wrong << "; " << name << " counts " << node.num_children[tier] << " of "
              << num_children[tier] << " children in tier " << tier;
    }
}

void PrefixTree::recount_pages(const Node& node, Recount& recount) const {
    std::ostringstream& wrong = recount.wrong;
    std::vector<uint8_t>& in_tree = recount.tiers[node.tier].in_tree;
    const bool is_locked = recount.locks[&node] > 0;
    for (const Page page : node.pages) {
        if (page < 0 || static_cast<size_t>(page) >= in_tree.size()) {
            wrong << "; foreign page " << page << " in " << name_of(node);
            continue;
        }
        if (++in_tree[static_cast<size_t>(page)] > 1) {
            wrong << "; page " << page << " is again in " << name_of(node);
        }
        const int32_t references = tiers_[node.tier].pool->ref_count(page);
        if (references < 1 || (references > 1 && !is_locked)) {
            wrong << "; page " << page << " in " << name_of(node) << " with " << node.num_locks
                  << " locks has " << references << " references";
        }
        recount_group_pages(node, page, recount);
    }
}

void PrefixTree::recount_group_pages(const Node& node, Page owner, Recount& recount) const {
    const PagePool& pool = *tiers_[node.tier].pool;
    if (!pool.has_group_pages(owner)) return;
    Recount::Counts& counts = recount.tiers[node.tier];
    bool is_idle = true;
    for (const Page page : pool.group_pages(owner)) {
        is_idle = is_idle && pool.ref_count(page) == 1;
        if (++counts.in_tree[static_cast<size_t>(page)] > 1) {
            recount.wrong << "; group page " << page << " of page " << owner << " is in it again";
        }
    }
    if (!is_idle && recount.locks[&node] == 0) {
        recount.wrong << "; group pages of page " << owner << " in " << name_of(node)
                      << " without locks are used";
    }
    ++counts.num_with_group_pages;
    counts.num_idle += is_idle ? 1 : 0;
}

void PrefixTree::sanity_check() const {
    const std::vector<View> views = walk();
    Recount recount;
    std::ostringstream& wrong = recount.wrong;
    if (views.size() != nodes_.size()) {
        wrong << "; a walk finds " << views.size() << " nodes of " << nodes_.size();
    }
    for (size_t index = 0; index < nodes_.size(); ++index) {
        if (nodes_[index]->index != index) wrong << "; node " << index << " has another's number";
    }
    recount.tiers.resize(tiers_.size());
    for (size_t tier = 0; tier < tiers_.size(); ++tier) {
        recount.tiers[tier].in_tree.resize(tiers_[tier].in_tree.size());
    }
    recount_receipts(views, recount);
    for (const View& view : views) {
        recount_node(view, recount);
        recount_children(*view.node, recount);
        recount_pages(*view.node, recount);
    }
    for (size_t tier = 0; tier < tiers_.size(); ++tier) {
        const TierBooks& books = tiers_[tier];
        const Recount::Counts& counts = recount.tiers[tier];
        const std::string where = " of tier " + std::to_string(tier);
        const auto compare = [&](int64_t counted, int64_t found, const std::string& what) {
            if (counted == found) return;
            wrong << "; " << counted << " " << what << " are counted, " << found << " found";
        };
        compare(books.num_pages, counts.num_pages, "pages" + where);
        compare(books.num_evictable, counts.num_evictable, "evictable pages" + where);
        compare(books.num_with_group_pages, counts.num_with_group_pages,
                "pages" + where + " with group pages");
        if (books.num_group_pages() > 0) {
            compare(books.pool->num_idle(), counts.num_idle,
                    "pages" + where + "'s pool with idle group pages");
        }
        compare(static_cast<int64_t>(books.order.size()), static_cast<int64_t>(counts.num_listed),
                "leaves" + where);
        if (books.in_tree != counts.in_tree) {
            wrong << "; the marks of pages" << where << " are off";
        }
    }
    const std::string text = wrong.str();
    if (text.empty()) return;
    std::ostringstream message;
    message << "the prefix tree doesn't balance: " << num_nodes() << " nodes, ";
    for (size_t tier = 0; tier < tiers_.size(); ++tier) {
        const auto number = static_cast<Tier>(tier);
        message << pages_of(number) << " pages of tier " << tier << " (" << evictable_of(number)
                << " evictable), ";
    }
    message << num_receipts() << " receipts" << text;
    throw TreeError(message.str());
}

}  // namespace aioserve

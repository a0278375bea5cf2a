// The tree against a recount of itself.

#include <algorithm>
#include <sstream>
#include <unordered_map>

#include "tree/prefix_tree.h"

namespace aioserve {

namespace {

std::string name_of(const Node& node) {
    if (node.is_root()) return "a root";
    return (node.tier == kDevice ? "the device node of page " : "the host node of page ") +
           (node.pages.empty() ? "none" : std::to_string(node.pages[0]));
}

}  // namespace

void PrefixTree::sanity_check() const {
    std::ostringstream wrong;
    const std::vector<View> views = walk();
    if (views.size() != nodes_.size()) {
        wrong << "; a walk finds " << views.size() << " nodes of " << nodes_.size();
    }
    for (size_t index = 0; index < nodes_.size(); ++index) {
        if (nodes_[index]->index != index) wrong << "; node " << index << " has another's place";
    }

    std::unordered_map<const Node*, int64_t> locks;
    size_t num_ends = 0;
    for (const View& view : views) {
        for (const ReceiptId id : view.receipts) {
            ++num_ends;
            const auto found = receipts_.find(id);
            if (found == receipts_.end() || found->second.end != view.node) {
                wrong << "; receipt " << id << " is listed where it doesn't end";
            }
            for (const Node* node = view.node; node; node = node->parent) ++locks[node];
        }
    }
    if (num_ends != receipts_.size()) {
        wrong << "; " << num_ends << " of " << receipts_.size() << " receipts end in the tree";
    }

    struct Counts {
        int64_t num_pages = 0;
        int64_t num_evictable = 0;
        size_t num_listed = 0;
        std::vector<uint8_t> seen;
    };
    std::array<Counts, 2> counts;
    for (const Tier tier : {kDevice, kHost}) counts[tier].seen.resize(tiers_[tier].in_tree.size());
    for (const View& view : views) {
        const Node& node = *view.node;
        const std::string name = name_of(node);
        const size_t size = node.pages.size();
        if (node.num_locks != locks[&node]) {
            wrong << "; " << name << " has " << node.num_locks << " locks for " << locks[&node]
                  << " receipts";
        }
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

        int64_t num_device_children = 0;
        const Node* previous = nullptr;
        for (const Node* child : node.children) {
            const std::string child_name = name_of(*child);
            if (child->parent != &node || *child->place != child) {
                wrong << "; " << child_name << " has another parent or place";
            }
            if (child->tier == kDevice) ++num_device_children;
            if (child->tier == kDevice && node.tier == kHost) {
                wrong << "; " << child_name << " is below " << name;
            }
            if (previous != nullptr && !node.children.key_comp()(previous, child)) {
                wrong << "; " << child_name << " is out of order or like its sibling";
            }
            if (!node.is_root() && (child->use.created < node.use.created ||
                                    child->use.last_used > node.use.last_used ||
                                    child->use.hits > node.use.hits)) {
                wrong << "; " << child_name << " was used more than " << name << " above it";
            }
            previous = child;
        }
        if (num_device_children != node.num_device_children) {
            wrong << "; " << name << " counts " << node.num_device_children << " of "
                  << num_device_children << " children on the device";
        }

        const TierBooks& books = tiers_[node.tier];
        const bool leaf = node.tier == kDevice ? num_device_children == 0 : node.children.empty();
        const bool listed = leaf && node.num_locks == 0 && !node.is_root();
        if (listed != node.is_listed) {
            wrong << "; " << name << (listed ? " isn't" : " is") << " listed for eviction";
        } else if (listed && (node.listing->first != strategy_->key(node.use) ||
                              node.listing->second != view.node)) {
            wrong << "; " << name << " is listed under another key";
        }
        Counts& count = counts[node.tier];
        count.num_listed += listed ? 1 : 0;
        count.num_pages += static_cast<int64_t>(size);
        if (node.num_locks == 0) count.num_evictable += static_cast<int64_t>(size);
        for (const Page page : node.pages) {
            if (page < 0 || static_cast<size_t>(page) >= count.seen.size()) {
                wrong << "; foreign page " << page << " in " << name;
                continue;
            }
            if (++count.seen[static_cast<size_t>(page)] > 1) {
                wrong << "; page " << page << " is again in " << name;
            }
            const int32_t references = books.pool->ref_count(page);
            if (references < 1 || (node.num_locks == 0 && references != 1)) {
                wrong << "; page " << page << " in " << name << " with " << node.num_locks
                      << " locks has " << references << " references";
            }
        }
    }

    for (const Tier tier : {kDevice, kHost}) {
        const TierBooks& books = tiers_[tier];
        const Counts& count = counts[tier];
        const char* where = tier == kDevice ? "device" : "host";
        if (books.num_pages != count.num_pages) {
            wrong << "; " << books.num_pages << " " << where << " pages are counted, "
                  << count.num_pages << " found";
        }
        if (books.num_evictable != count.num_evictable) {
            wrong << "; " << books.num_evictable << " evictable " << where << " pages are counted, "
                  << count.num_evictable << " found";
        }
        if (books.order.size() != count.num_listed) {
            wrong << "; " << books.order.size() << " " << where << " leaves are listed, "
                  << count.num_listed << " found";
        }
        if (books.in_tree != count.seen) wrong << "; the marks of " << where << " pages are off";
    }
    const std::string text = wrong.str();
    if (text.empty()) return;
    std::ostringstream message;
    message << "the prefix tree doesn't balance: " << num_nodes() << " nodes, " << num_pages()
            << " device pages (" << num_evictable() << " evictable), " << num_host_pages()
            << " host pages (" << num_host_evictable() << " evictable), " << num_receipts()
            << " receipts" << text;
    throw TreeError(message.str());
}

}  // namespace aioserve

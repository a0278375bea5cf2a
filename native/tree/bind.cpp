// Python's view of the prefix tree; `aioserve/kv/prefix_tree.py` is the typed face of this class.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>

#include "common/int32_buffer.h"
#include "tree/prefix_tree.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace aioserve;

namespace {

// Asks Python for a score. Nothing may be thrown in the middle of a change of the tree: an answer
// that isn't a float is none. Ctrl-C during the call is put off until Python goes on.
std::optional<double> ask(const nb::object& score, const NodeUse& use) {
    try {
        const nb::object answer = score(use.created, use.last_used, use.hits);
        double number = 0;
        if (nb::try_cast(answer, number) && number == number) return number;
    } catch (nb::python_error& error) {
        if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    } catch (const std::exception&) {
    }
    return std::nullopt;
}

// A name, or a function that gives the score of a use.
std::unique_ptr<EvictionStrategy> strategy_of(const nb::object& strategy) {
    std::string_view name;
    if (nb::try_cast(strategy, name)) return make_strategy(name);
    return std::make_unique<CustomStrategy>(
        [strategy](const NodeUse& use) { return ask(strategy, use); });
}

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::tuple match(PrefixTree& tree, const nb::bytes& name_space, nb::handle token_ids, bool partial,
                bool use, bool whole, nb::handle out) {
    const Int32Buffer tokens(token_ids, false, "token_ids");
    const Int32Buffer pages(out, true, "out");
    const size_t most = tokens.span().size() / tree.page_size();
    if (pages.span().size() < most) {
        throw std::invalid_argument("out must have room for " + std::to_string(most) +
                                    " pages, got " + std::to_string(pages.span().size()));
    }
    const PrefixTree::Match found =
        tree.match(view_of(name_space), tokens.span(), partial, use, whole, pages.span());
    int64_t end = 0;
    nb::list ends;  // of the pages of each tier in `out`
    for (size_t tier = 0; tier < tree.num_tiers(); ++tier) {
        end += found.num_pages[tier];
        ends.append(end);
    }
    return nb::make_tuple(found.receipt, ends, end, found.tail_page, found.tail_tokens,
                          found.tail_receipt);
}

nb::tuple peek(const PrefixTree& tree, const nb::bytes& name_space, nb::handle token_ids,
               bool whole) {
    const Int32Buffer tokens(token_ids, false, "token_ids");
    const PrefixTree::Found found = tree.peek(view_of(name_space), tokens.span(), whole);
    nb::list counts;
    for (size_t tier = 0; tier < tree.num_tiers(); ++tier) counts.append(found[tier]);
    return nb::tuple(counts);
}

int64_t insert(PrefixTree& tree, ReceiptId receipt, nb::handle token_ids, nb::handle page_ids,
               nb::handle group_page_ids, Step step) {
    const Int32Buffer tokens(token_ids, false, "token_ids");
    const Int32Buffer pages(page_ids, false, "page_ids");
    if (group_page_ids.is_none()) return tree.insert(receipt, tokens.span(), pages.span(), {}, step);
    const Int32Buffer others(group_page_ids, false, "group_page_ids");
    return tree.insert(receipt, tokens.span(), pages.span(), others.span(), step);
}

void promote(PrefixTree& tree, ReceiptId receipt, nb::handle page_ids, nb::handle group_page_ids,
             Step step) {
    const Int32Buffer pages(page_ids, false, "page_ids");
    if (group_page_ids.is_none()) return tree.promote(receipt, pages.span(), {}, step);
    const Int32Buffer others(group_page_ids, false, "group_page_ids");
    tree.promote(receipt, pages.span(), others.span(), step);
}

nb::bytes bytes_of(const std::vector<Page>& pages) {
    return nb::bytes(reinterpret_cast<const char*>(pages.data()), pages.size() * sizeof(Page));
}

Tier tier_of(const PrefixTree& tree, int64_t tier) {
    if (tier < 0 || static_cast<size_t>(tier) >= tree.num_tiers()) {
        throw std::invalid_argument("tier must be in [0, " + std::to_string(tree.num_tiers()) +
                                    "), got " + std::to_string(tier));
    }
    return static_cast<Tier>(tier);
}

nb::tuple evict(PrefixTree& tree, int64_t count, Step step, int64_t tier) {
    const PrefixTree::Evicted evicted = tree.evict(tier_of(tree, tier), count, step);
    std::vector<int32_t> tiers;
    std::vector<Page> sources;
    std::vector<Page> targets;
    for (const PrefixTree::Move& move : evicted.moves) {
        tiers.push_back(move.tier);
        sources.push_back(move.source);
        targets.push_back(move.target);
    }
    return nb::make_tuple(evicted.count, bytes_of(tiers), bytes_of(sources), bytes_of(targets));
}

nb::tuple tuple_of(const std::vector<PrefixTree::Shortened>& list) {
    nb::list pairs;
    for (const auto& [receipt, num_pages] : list) pairs.append(nb::make_tuple(receipt, num_pages));
    return nb::tuple(pairs);
}

template <class T>
nb::tuple tuple_of(const std::vector<T>& values) {
    nb::list list;
    for (const T value : values) list.append(value);
    return nb::tuple(list);
}

nb::list walk(const PrefixTree& tree) {
    nb::list nodes;
    for (const PrefixTree::View& view : tree.walk()) {
        const Node& node = *view.node;
        nb::list others;
        for (const Page page : node.pages) {
            const std::span<const Page> own = tree.group_pages(node, page);
            others.append(tuple_of(std::vector<Page>(own.begin(), own.end())));
        }
        nodes.append(nb::make_tuple(
            nb::bytes(view.name_space->data(), view.name_space->size()), view.parent,
            tuple_of(node.tokens), tuple_of(node.pages), tuple_of(node.steps), int(node.tier),
            node.num_locks, tuple_of(view.receipts), node.use.created, node.use.last_used,
            node.use.hits, nb::tuple(others)));
    }
    return nodes;
}

}  // namespace

void bind_tree(nb::module_& m) {
    const nb::object errors = nb::module_::import_("aioserve.errors");
    nb::exception<TreeError>(m, "TreeError", errors.attr("InvariantError"));

    nb::class_<PrefixTree>(m, "PrefixTree")
        .def(
            "__init__",
            [](PrefixTree* tree, const nb::list& pools, const nb::object& strategy,
               int64_t needed_tokens) {
                std::vector<PagePool*> tiers;
                for (const nb::handle pool : pools) tiers.push_back(nb::cast<PagePool*>(pool));
                new (tree) PrefixTree(tiers, strategy_of(strategy), needed_tokens);
            },
            "pools"_a, "strategy"_a, "needed_tokens"_a, nb::keep_alive<1, 2>())
        .def("match", &match)
        .def("use", &PrefixTree::use)
        .def("peek", &peek)
        .def("insert", &insert, "receipt"_a, "token_ids"_a, "page_ids"_a, "group_page_ids"_a.none(),
             "step"_a)
        .def("promote", &promote, "receipt"_a, "page_ids"_a, "group_page_ids"_a.none(), "step"_a)
        .def("fork", &PrefixTree::fork)
        .def("release", &PrefixTree::release)
        .def("evict", &evict)
        .def("frees_at_once", &PrefixTree::frees_at_once)
        .def("clear", &PrefixTree::clear)
        .def("withdraw",
             [](PrefixTree& tree, Step step) { return tuple_of(tree.withdraw(step)); })
        .def("cut", [](PrefixTree& tree, ReceiptId receipt,
                       int64_t num_pages) { return tuple_of(tree.cut(receipt, num_pages)); })
        .def("page_ids", [](const PrefixTree& tree, ReceiptId receipt,
                            int64_t first) { return bytes_of(tree.page_ids(receipt, first)); })
        .def("num_exclusive", &PrefixTree::num_exclusive)
        .def("walk", &walk)
        .def("sanity_check", &PrefixTree::sanity_check)
        .def_prop_ro("num_pages", &PrefixTree::num_pages)
        .def_prop_ro("num_evictable", &PrefixTree::num_evictable)
        .def("num_pages_in",
             [](const PrefixTree& tree, int64_t tier) {
                 return tree.pages_of(tier_of(tree, tier));
             })
        .def("num_evictable_in",
             [](const PrefixTree& tree, int64_t tier) {
                 return tree.evictable_of(tier_of(tree, tier));
             })
        .def_prop_ro("num_nodes", &PrefixTree::num_nodes)
        .def_prop_ro("num_receipts", &PrefixTree::num_receipts);
}

// Binds drafters; `aioserve/drafting/ngram.py` and `suffix.py` are their typed faces.

#include <nanobind/nanobind.h>

#include <limits>
#include <string>

#include "common/int32_buffer.h"
#include "drafting/ngram_drafter.h"
#include "drafting/suffix_drafter.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace aioserve;
using namespace aioserve::drafting;

namespace {

Token token_of(nb::handle object) {
    const Py_ssize_t number = PyNumber_AsSsize_t(object.ptr(), nullptr);
    if (number == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    if (number < 0 || number > std::numeric_limits<Token>::max())
        throw std::invalid_argument("token_ids must be in [0, 2147483647], got " +
                                    std::to_string(number));
    return static_cast<Token>(number);
}

std::span<const Token> checked(std::span<const Token> tokens, const char* name) {
    for (const Token token : tokens)
        if (token < 0)
            throw std::invalid_argument(std::string(name) + " must be in [0, 2147483647], got " +
                                        std::to_string(token));
    return tokens;
}

void check_prompt(size_t prompt_tokens, std::span<const Token> known) {
    if (prompt_tokens > known.size())
        throw std::invalid_argument("prompt_tokens must be in [0, " + std::to_string(known.size()) +
                                    "], got " + std::to_string(prompt_tokens));
}

void check_lengths(nb::sequence slots, nb::sequence others, const char* name) {
    if (nb::len(slots) != nb::len(others))
        throw std::invalid_argument(std::string(name) + " must have " +
                                    std::to_string(nb::len(slots)) + " entries, got " +
                                    std::to_string(nb::len(others)));
}

// All is checked before anything changes.
template <class Drafter>
void extend(Drafter& drafter, nb::sequence slots, nb::sequence token_ids) {
    check_lengths(slots, token_ids, "token_ids");
    const size_t count = nb::len(slots);
    std::vector<Token> tokens;
    std::vector<std::pair<Slot, size_t>> ends;
    for (size_t i = 0; i < count; ++i) {
        const Slot slot = nb::cast<Slot>(slots[i]);
        drafter.check(slot);
        for (const nb::handle token : token_ids[i]) tokens.push_back(token_of(token));
        ends.emplace_back(slot, tokens.size());
    }
    size_t begin = 0;
    for (const auto& [slot, end] : ends) {
        drafter.extend(slot, std::span(tokens).subspan(begin, end - begin));
        begin = end;
    }
}

template <class Drafter>
nb::list draft(Drafter& drafter, nb::sequence slots, nb::sequence limits) {
    check_lengths(slots, limits, "limits");
    const size_t count = nb::len(slots);
    nb::list drafts;
    for (size_t i = 0; i < count; ++i) {
        const int64_t limit = nb::cast<int64_t>(limits[i]);
        if (limit < 1)
            throw std::invalid_argument("limit must be at least 1, got " + std::to_string(limit));
        nb::list tokens;
        for (const Token token :
             drafter.draft(nb::cast<Slot>(slots[i]), static_cast<size_t>(limit)))
            tokens.append(token);
        drafts.append(tokens);
    }
    return drafts;
}

}  // namespace

// Calls that take as long as a sequence is let Python's other threads run.
void bind_drafting(nb::module_& m) {
    const nb::object errors = nb::module_::import_("aioserve.errors");
    nb::exception<DraftingError>(m, "DraftingError", errors.attr("InvariantError"));

    nb::class_<NgramDrafter>(m, "NgramDrafter")
        .def(nb::init<size_t, size_t>(), "min_ngram"_a, "max_ngram"_a)
        .def(
            "start",
            [](NgramDrafter& drafter, Slot slot, nb::handle known_ids, size_t prompt_tokens,
               nb::handle predicted_ids) {
                const Int32Buffer known(known_ids, false, "known_ids");
                const Int32Buffer predicted(predicted_ids, false, "predicted_ids");
                check_prompt(prompt_tokens, known.span());
                const nb::gil_scoped_release release;
                drafter.start(slot, checked(known.span(), "known_ids"), prompt_tokens,
                              checked(predicted.span(), "predicted_ids"));
            },
            "slot"_a, "known_ids"_a, "prompt_tokens"_a, "predicted_ids"_a)
        .def("extend", &extend<NgramDrafter>, "slots"_a, "token_ids"_a)
        .def("draft", &draft<NgramDrafter>, "slots"_a, "limits"_a)
        .def("end", &NgramDrafter::end, "slot"_a)
        .def_prop_ro("num_bytes", &NgramDrafter::num_bytes);

    nb::class_<SuffixDrafter>(m, "SuffixDrafter")
        .def(
            "__init__",
            [](SuffixDrafter* drafter, uint32_t max_depth, double max_factor,
               double min_probability, size_t cache_tokens) {
                new (drafter) SuffixDrafter({.max_depth = max_depth,
                                             .max_factor = max_factor,
                                             .min_probability = min_probability,
                                             .cache_tokens = cache_tokens});
            },
            "max_depth"_a, "max_factor"_a, "min_probability"_a, "cache_tokens"_a)
        .def(
            "start",
            [](SuffixDrafter& drafter, Slot slot, nb::handle known_ids, size_t prompt_tokens,
               const nb::bytes& name_space, nb::handle predicted_ids) {
                const Int32Buffer known(known_ids, false, "known_ids");
                const Int32Buffer predicted(predicted_ids, false, "predicted_ids");
                check_prompt(prompt_tokens, known.span());
                const std::string_view name(name_space.c_str(), name_space.size());
                const nb::gil_scoped_release release;
                drafter.start(slot, checked(known.span(), "known_ids"), prompt_tokens, name,
                              checked(predicted.span(), "predicted_ids"));
            },
            "slot"_a, "known_ids"_a, "prompt_tokens"_a, "namespace"_a, "predicted_ids"_a)
        .def("extend", &extend<SuffixDrafter>, "slots"_a, "token_ids"_a)
        .def("draft", &draft<SuffixDrafter>, "slots"_a, "limits"_a)
        .def("end", &SuffixDrafter::end, "slot"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("sanity_check", &SuffixDrafter::sanity_check)
        .def_prop_ro("num_cached_tokens", &SuffixDrafter::num_cached_tokens)
        .def_prop_ro("num_bytes", &SuffixDrafter::num_bytes);
}

#include "drafting/suffix_drafter.h"

#include <algorithm>

namespace aioserve::drafting {

namespace {

// FNV-1a, over tokens in place of bytes.
uint64_t hash_of(std::span<const Token> tokens) {
    uint64_t hash = 0xCBF29CE484222325 ^ tokens.size();
    for (const Token token : tokens) hash = (hash ^ static_cast<uint32_t>(token)) * 0x100000001B3;
    return hash;
}

}  // namespace

SuffixDrafter::SuffixDrafter(const Options& options)
    : options_(options), answers_(options.max_depth, options.cache_tokens) {}

void SuffixDrafter::start(Slot slot, std::span<const Token> known, size_t prompt_tokens,
                          std::string_view name_space, std::span<const Token> predicted) {
    slots_.check_free(slot);
    const std::span<const Token> prompt = known.first(prompt_tokens);
    const std::span<const Token> answer = known.subspan(prompt_tokens);
    auto sequence = std::make_unique<Sequence>(options_.max_depth, name_space, hash_of(prompt));
    sequence->known.reserve(known.size());
    for (const Token token : prompt) sequence->known.append(token);
    if (!predicted.empty()) {
        sequence->prediction.emplace(predicted);
        sequence->prediction->follow(sequence->answer.data() + 1);
    }
    sequence->extend(answer);
    if (!answer.empty()) answers_.take_back(name_space, sequence->prompt, answer);
    slots_.put(slot, std::move(sequence));
}

void SuffixDrafter::Sequence::extend(std::span<const Token> tokens) {
    for (const Token token : tokens) {
        known.append(token);
        answer.push_back(token);
        if (prediction) prediction->follow(answer.data() + answer.size());
    }
}

void SuffixDrafter::extend(Slot slot, std::span<const Token> tokens) { slots_[slot].extend(tokens); }

void SuffixDrafter::catch_up(Sequence& sequence, const SuffixTree& tree) const {
    const size_t length = sequence.answer.size();
    if (sequence.version != answers_.version()) {
        sequence.version = answers_.version();
        sequence.match = {};
        sequence.followed = length - std::min<size_t>(length, options_.max_depth);
    }
    while (sequence.followed < length)
        tree.follow(sequence.match, sequence.answer.data() + ++sequence.followed);
}

std::vector<Token> SuffixDrafter::draft(Slot slot, size_t limit) {
    Sequence& sequence = slots_[slot];
    if (sequence.prediction) {
        std::vector<Token> tokens = sequence.prediction->draft(limit);
        if (!tokens.empty()) return tokens;
    }
    const DraftLimits limits{.tokens = limit,
                             .factor = options_.max_factor,
                             .min_probability = options_.min_probability};
    Draft best;
    const std::span<const Token> text = sequence.known.text();
    sequence.known.draft(sequence.known.active(), text.data() + text.size(), limits, best);
    if (const SuffixTree* tree = answers_.tree_of(sequence.name_space)) {
        catch_up(sequence, *tree);
        tree->draft(sequence.match, sequence.answer.data() + sequence.answer.size(), limits, best);
    }
    return std::move(best.tokens);
}

void SuffixDrafter::end(Slot slot) {
    const Sequence& sequence = slots_[slot];
    answers_.add(sequence.name_space, sequence.prompt, std::span(sequence.answer).subspan(1));
    slots_.erase(slot);
}

size_t SuffixDrafter::Sequence::num_bytes() const {
    return sizeof(*this) + known.num_bytes() + name_space.capacity() +
           answer.capacity() * sizeof(Token) + (prediction ? prediction->num_bytes() : 0);
}

void SuffixDrafter::sanity_check() const {
    answers_.sanity_check();
    for (const auto& [slot, sequence] : slots_.all()) sequence->known.sanity_check();
}

}  // namespace aioserve::drafting

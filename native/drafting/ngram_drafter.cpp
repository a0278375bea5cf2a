#include "drafting/ngram_drafter.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "drafting/scatter.h"

namespace aioserve::drafting {

NgramIndex::NgramIndex(size_t min_length, size_t max_length, size_t num_tokens)
    : min_length_(min_length), tables_(max_length - min_length + 1) {
    text_.reserve(num_tokens);
    for (Table& table : tables_) table.ends.assign(std::bit_ceil(2 * num_tokens + 16), 0);
}

void NgramIndex::append(Token token) {
    if (text_.size() >= std::numeric_limits<uint32_t>::max())
        throw DraftingError("an index has no number for a token left");
    text_.push_back(token);
    for (size_t i = 0; i < tables_.size() && min_length_ + i <= text_.size(); ++i)
        put(tables_[i], min_length_ + i);
}

// Linear probing, half full at most.
size_t NgramIndex::place_of(const Table& table, size_t length, size_t end) const {
    const Token* run = text_.data() + end - length;
    uint64_t hash = 0;
    for (size_t i = 0; i < length; ++i) hash = scattered(hash ^ static_cast<uint32_t>(run[i]));
    const size_t mask = table.ends.size() - 1;
    for (size_t place = (hash >> 32) & mask;; place = (place + 1) & mask) {
        const uint32_t other = table.ends[place];
        if (other == 0 || std::equal(run, run + length, text_.data() + other - length)) return place;
    }
}

void NgramIndex::put(Table& table, size_t length) {
    if (2 * (table.num_used + 1) > table.ends.size()) grow(table, length);
    uint32_t& end = table.ends[place_of(table, length, text_.size())];
    table.num_used += end == 0;
    table.before = end;
    end = static_cast<uint32_t>(text_.size());
}

void NgramIndex::grow(Table& table, size_t length) {
    std::vector<uint32_t> ends(2 * table.ends.size());
    ends.swap(table.ends);
    for (const uint32_t end : ends)
        if (end != 0) table.ends[place_of(table, length, end)] = end;
}

std::vector<Token> NgramIndex::draft(size_t num_tokens) const {
    const auto found = std::find_if(tables_.rbegin(), tables_.rend(),
                                    [](const Table& table) { return table.before != 0; });
    if (found == tables_.rend()) return {};
    std::vector<Token> tokens;
    tokens.reserve(num_tokens);
    for (size_t place = found->before; tokens.size() < num_tokens; ++place)
        tokens.push_back(place < text_.size() ? text_[place] : tokens[place - text_.size()]);
    return tokens;
}

size_t NgramIndex::num_bytes() const {
    size_t bytes = text_.capacity() * sizeof(Token);
    for (const Table& table : tables_) bytes += table.ends.capacity() * sizeof(uint32_t);
    return bytes;
}

void NgramDrafter::start(Slot slot, std::span<const Token> known, size_t prompt_tokens,
                         std::span<const Token> predicted) {
    slots_.check_free(slot);
    auto sequence = std::make_unique<Sequence>(min_length_, max_length_, known.size());
    for (const Token token : known.first(prompt_tokens)) sequence->known.append(token);
    if (!predicted.empty()) {
        sequence->prediction.emplace(predicted);
        sequence->prediction->follow(sequence->answer.data() + 1);
    }
    sequence->extend(known.subspan(prompt_tokens));
    slots_.put(slot, std::move(sequence));
}

void NgramDrafter::Sequence::extend(std::span<const Token> tokens) {
    for (const Token token : tokens) {
        known.append(token);
        if (!prediction) continue;
        answer.push_back(token);
        prediction->follow(answer.data() + answer.size());
    }
}

void NgramDrafter::extend(Slot slot, std::span<const Token> tokens) { slots_[slot].extend(tokens); }

std::vector<Token> NgramDrafter::draft(Slot slot, size_t limit) const {
    const Sequence& sequence = slots_[slot];
    if (sequence.prediction) {
        std::vector<Token> tokens = sequence.prediction->draft(limit);
        if (!tokens.empty()) return tokens;
    }
    return sequence.known.draft(limit);
}

void NgramDrafter::end(Slot slot) {
    check(slot);
    slots_.erase(slot);
}

size_t NgramDrafter::Sequence::num_bytes() const {
    return sizeof(*this) + known.num_bytes() + answer.capacity() * sizeof(Token) +
           (prediction ? prediction->num_bytes() : 0);
}

}  // namespace aioserve::drafting

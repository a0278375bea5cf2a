// Drafts from the last place where the last few tokens stood before.

#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "drafting/prediction.h"
#include "drafting/slots.h"

namespace aioserve::drafting {

// Where each run of min_length to max_length tokens stood last. As in prompt lookup decoding (Saxena
// 2023), with an index in place of a search.
class NgramIndex {
  public:
    // Made for a text of `num_tokens` or more.
    NgramIndex(size_t min_length, size_t max_length, size_t num_tokens);

    void append(Token token);
    // What follows the longest of the last runs that stood before, where it stood last. Goes on from
    // the end of the text into the draft.
    std::vector<Token> draft(size_t num_tokens) const;

    size_t num_bytes() const;

  private:
    // By the end of a run in the text, 0 for none. Runs are equal where all their tokens are.
    struct Table {
        std::vector<uint32_t> ends;
        size_t num_used = 0;
        uint32_t before = 0;  // where the last run stood before
    };

    void put(Table& table, size_t length);
    void grow(Table& table, size_t length);
    size_t place_of(const Table& table, size_t length, size_t end) const;

    size_t min_length_;
    std::vector<Token> text_;
    std::vector<Table> tables_;  // by length - min_length
};

class NgramDrafter {
  public:
    NgramDrafter(size_t min_length, size_t max_length)
        : min_length_(min_length), max_length_(max_length) {}
    NgramDrafter(const NgramDrafter&) = delete;
    NgramDrafter& operator=(const NgramDrafter&) = delete;

    void start(Slot slot, std::span<const Token> known, size_t prompt_tokens,
               std::span<const Token> predicted);
    void check(Slot slot) const { slots_[slot]; }
    void extend(Slot slot, std::span<const Token> tokens);
    std::vector<Token> draft(Slot slot, size_t limit) const;
    void end(Slot slot);

    size_t num_bytes() const { return slots_.num_bytes(); }

  private:
    struct Sequence {
        Sequence(size_t min_length, size_t max_length, size_t num_tokens)
            : known(min_length, max_length, num_tokens) {}

        NgramIndex known;
        std::optional<Prediction> prediction;
        std::vector<Token> answer{kStart};  // where there is a prediction

        void extend(std::span<const Token> tokens);
        size_t num_bytes() const;
    };

    size_t min_length_, max_length_;
    Slots<Sequence> slots_;
};

}  // namespace aioserve::drafting

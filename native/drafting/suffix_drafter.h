// Drafts from suffix trees: of each sequence, of its prediction, and of recent answers.

#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "drafting/prediction.h"
#include "drafting/recent_answers.h"
#include "drafting/slots.h"
#include "drafting/suffix_tree.h"

namespace aioserve::drafting {

class SuffixDrafter {
  public:
    struct Options {
        uint32_t max_depth;
        double max_factor;
        double min_probability;
        size_t cache_tokens;
    };

    explicit SuffixDrafter(const Options& options);
    SuffixDrafter(const SuffixDrafter&) = delete;
    SuffixDrafter& operator=(const SuffixDrafter&) = delete;

    void start(Slot slot, std::span<const Token> known, size_t prompt_tokens,
               std::string_view name_space, std::span<const Token> predicted);
    void check(Slot slot) const { slots_[slot]; }
    void extend(Slot slot, std::span<const Token> tokens);
    std::vector<Token> draft(Slot slot, size_t limit);
    void end(Slot slot);

    size_t num_cached_tokens() const { return answers_.num_tokens(); }
    size_t num_bytes() const { return slots_.num_bytes() + answers_.num_bytes(); }
    void sanity_check() const;

  private:
    struct Sequence {
        Sequence(uint32_t max_depth, std::string_view its_namespace, uint64_t its_prompt)
            : known(max_depth, false), name_space(its_namespace), prompt(its_prompt) {}

        SuffixTree known;
        std::string name_space;
        uint64_t prompt;  // tells prompts apart
        std::vector<Token> answer{kStart};
        std::optional<Prediction> prediction;
        // Where the answer stands among recent ones: of its first `followed` tokens, in the trees of
        // this version.
        SuffixTree::Match match;
        size_t followed = 0;
        uint64_t version = 0;

        void extend(std::span<const Token> tokens);
        size_t num_bytes() const;
    };

    void catch_up(Sequence& sequence, const SuffixTree& tree) const;

    Options options_;
    Slots<Sequence> slots_;
    RecentAnswers answers_;
};

}  // namespace aioserve::drafting

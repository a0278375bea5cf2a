// The answers that ended last, by namespace: what several sequences have in common.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "drafting/suffix_tree.h"

namespace aioserve::drafting {

// Keeps `max_tokens` of all namespaces together, the oldest answers go first. An answer that a
// sequence takes back leaves its room when it is the oldest.
class RecentAnswers {
  public:
    RecentAnswers(uint32_t max_depth, size_t max_tokens);

    // `prompt` tells prompts apart.
    void add(std::string_view name_space, uint64_t prompt, std::span<const Token> answer);
    // Removes what an earlier life of the same sequence has added: an answer to the same prompt of
    // which `answer` is the beginning, or which is its beginning.
    void take_back(std::string_view name_space, uint64_t prompt, std::span<const Token> answer);
    // None where the namespace has no answers. Whatever changed it, or made another, changed
    // `version`.
    const SuffixTree* tree_of(std::string_view name_space) const;
    uint64_t version() const { return version_; }

    size_t num_tokens() const { return num_tokens_; }
    size_t num_bytes() const;
    void sanity_check() const;

  private:
    struct Space {
        std::unique_ptr<SuffixTree> tree;
        size_t num_answers = 0;  // gone ones too, as long as they have their room
        size_t num_tokens = 0;
        size_t most_tokens = 0;  // since the tree was made
    };
    using Spaces = std::map<std::string, Space, std::less<>>;
    struct Answer {
        Spaces::iterator space;
        uint64_t prompt;
        size_t skipped;  // tokens at its beginning that are left out
        SuffixTree::Position start;
        size_t length;  // kStart included, kEnd not
        bool is_gone = false;
    };

    std::span<const Token> text_of(const Answer& answer) const;
    void drop_oldest();
    void make_smaller(Spaces::iterator space);

    uint32_t max_depth_;
    size_t max_tokens_;
    size_t num_tokens_ = 0;
    uint64_t version_ = 0;
    Spaces spaces_;
    std::deque<Answer> answers_;
};

}  // namespace aioserve::drafting

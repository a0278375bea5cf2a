// What a caller expects an answer to be.

#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "drafting/suffix_tree.h"

namespace aioserve::drafting {

class Prediction {
  public:
    // `tokens` without kStart.
    explicit Prediction(std::span<const Token> tokens) : tree_(kDepth, true) {
        std::vector<Token> marked{kStart};
        marked.insert(marked.end(), tokens.begin(), tokens.end());
        tree_.add(marked);
    }

    // The answer, which begins with kStart, has one token more, in front of `end`.
    void follow(const Token* end) {
        tree_.follow(match_, end);
        ++num_followed_;
    }

    // None where neither all of the answer nor its last two tokens stand in the prediction.
    std::vector<Token> draft(size_t num_tokens) const {
        if (match_.length < std::min<size_t>(2, num_followed_)) return {};
        return tree_.draft_behind(match_, num_tokens, 0).tokens;
    }

    size_t num_bytes() const { return tree_.num_bytes(); }

  private:
    static constexpr uint32_t kDepth = 64;

    SuffixTree tree_;
    SuffixTree::Match match_;
    size_t num_followed_ = 0;
};

}  // namespace aioserve::drafting

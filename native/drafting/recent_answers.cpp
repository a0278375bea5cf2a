#include "drafting/recent_answers.h"

#include <algorithm>

namespace aioserve::drafting {

namespace {

// A tree that once held so many times as many tokens is made anew.
constexpr size_t kShrink = 4;

size_t room_of(size_t length) { return length + 1; }

}  // namespace

RecentAnswers::RecentAnswers(uint32_t max_depth, size_t max_tokens)
    : max_depth_(max_depth), max_tokens_(max_tokens) {}

void RecentAnswers::add(std::string_view name_space, uint64_t prompt,
                        std::span<const Token> answer) {
    constexpr size_t kMarks = 2;
    if (answer.empty() || max_tokens_ <= kMarks) return;
    std::vector<Token> tokens;
    const size_t kept = std::min(answer.size(), max_tokens_ - kMarks);
    const size_t skipped = answer.size() - kept;
    tokens.reserve(kept + 1);
    if (skipped == 0) tokens.push_back(kStart);
    tokens.insert(tokens.end(), answer.begin() + static_cast<std::ptrdiff_t>(skipped), answer.end());
    while (num_tokens_ + room_of(tokens.size()) > max_tokens_) drop_oldest();

    const auto place = spaces_.try_emplace(std::string(name_space)).first;
    Space& space = place->second;
    if (space.tree == nullptr) space.tree = std::make_unique<SuffixTree>(max_depth_, true);
    answers_.push_back({.space = place,
                        .prompt = prompt,
                        .skipped = skipped,
                        .start = space.tree->add(tokens),
                        .length = tokens.size()});
    ++space.num_answers;
    space.num_tokens += room_of(tokens.size());
    space.most_tokens = std::max(space.most_tokens, space.num_tokens);
    num_tokens_ += room_of(tokens.size());
    ++version_;
}

void RecentAnswers::take_back(std::string_view name_space, uint64_t prompt,
                              std::span<const Token> answer) {
    for (auto found = answers_.rbegin(); found != answers_.rend(); ++found) {
        if (found->prompt != prompt || found->is_gone || found->space->first != name_space) continue;
        if (found->skipped > answer.size()) continue;
        const std::span<const Token> text = text_of(*found).subspan(found->skipped == 0);
        const std::span<const Token> other = answer.subspan(found->skipped);
        const size_t length = std::min(text.size(), other.size());
        if (!std::equal(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(length),
                        other.begin()))
            continue;
        found->space->second.tree->remove(found->start, found->length);
        found->is_gone = true;
        ++version_;
        return;
    }
}

std::span<const Token> RecentAnswers::text_of(const Answer& answer) const {
    return answer.space->second.tree->text(answer.start, answer.length);
}

void RecentAnswers::drop_oldest() {
    const Answer oldest = answers_.front();
    answers_.pop_front();
    Space& space = oldest.space->second;
    num_tokens_ -= room_of(oldest.length);
    space.num_tokens -= room_of(oldest.length);
    ++version_;
    if (--space.num_answers == 0) {
        spaces_.erase(oldest.space);
        return;
    }
    if (!oldest.is_gone) space.tree->remove(oldest.start, oldest.length);
    space.tree->forget_before(oldest.start + static_cast<SuffixTree::Position>(room_of(oldest.length)));
    if (kShrink * space.num_tokens < space.most_tokens) make_smaller(oldest.space);
}

// Memory that a tree has taken for more tokens than it holds goes with it.
void RecentAnswers::make_smaller(Spaces::iterator place) {
    Space& space = place->second;
    auto tree = std::make_unique<SuffixTree>(max_depth_, true);
    for (Answer& answer : answers_) {
        if (answer.space != place) continue;
        const std::span<const Token> text = text_of(answer);
        const SuffixTree::Position start = tree->add(text);
        if (answer.is_gone) tree->remove(start, answer.length);
        answer.start = start;
    }
    space.tree = std::move(tree);
    space.most_tokens = space.num_tokens;
}

const SuffixTree* RecentAnswers::tree_of(std::string_view name_space) const {
    const auto found = spaces_.find(name_space);
    return found == spaces_.end() ? nullptr : found->second.tree.get();
}

size_t RecentAnswers::num_bytes() const {
    size_t bytes = answers_.size() * sizeof(Answer);
    for (const auto& [name, space] : spaces_)
        bytes += name.capacity() + sizeof(Space) + space.tree->num_bytes();
    return bytes;
}

void RecentAnswers::sanity_check() const {
    size_t num_tokens = 0, num_answers = 0;
    for (const auto& [name, space] : spaces_) {
        space.tree->sanity_check();
        num_tokens += space.num_tokens;
        num_answers += space.num_answers;
    }
    size_t length = 0;
    for (const Answer& answer : answers_) length += room_of(answer.length);
    if (num_tokens != num_tokens_ || length != num_tokens_ || num_answers != answers_.size())
        throw DraftingError("recent answers are counted wrong");
}

}  // namespace aioserve::drafting

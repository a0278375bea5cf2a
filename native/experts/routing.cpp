#include "experts/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace aioserve::mixture {
namespace {

constexpr double kExp_ns = 6, kLook_ns = 0.7;
// Sums of weights up to 1 are taken in units of 2^-44, so that no order of the experts changes them.
constexpr double kUnits = 17592186044416.0;

void refuse(const char* name, const std::string& limits, int64_t got) {
    throw std::invalid_argument(std::string(name) + " must be " + limits + ", got " +
                                std::to_string(got));
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The index of the largest that isn't taken, the lowest of equal ones; the first of all where every
// one is NaN. There is one.
int64_t best_left(const float* values, int64_t count, const uint8_t* taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i) {
        if (taken[i]) continue;
        if (best < 0 || values[i] > values[best]) best = i;
    }
    return best;
}

// Chooses experts for one row after another, in memory that is kept between rows.
class Choice {
  public:
    explicit Choice(const Routing& routing)
        : routing_(routing),
          scores_(static_cast<std::size_t>(routing.experts)),
          keys_(scores_.size()),
          taken_(scores_.size()),
          group_keys_(static_cast<std::size_t>(routing.groups)),
          group_taken_(group_keys_.size()) {}

    void row(const float* logits, int32_t* ids, float* weights) {
        const int64_t top_k = routing_.top_k;
        const bool finite = score(logits);
        std::fill(taken_.begin(), taken_.end(), uint8_t{0});
        if (routing_.top_groups < routing_.groups) leave_groups_out();
        for (int64_t rank = 0; rank < top_k; ++rank) {
            const int64_t expert = best_left(keys_.data(), routing_.experts, taken_.data());
            taken_[static_cast<std::size_t>(expert)] = 1;
            ids[rank] = static_cast<int32_t>(expert);
        }
        weigh(logits, ids, weights);
        if (finite) return;
        for (int64_t rank = 0; rank < top_k; ++rank)
            weights[rank] = std::numeric_limits<float>::quiet_NaN();
    }

  private:
    // What chooses, and what weighs where that isn't relative to the chosen alone. Returns whether
    // the scores have no NaN and no +inf.
    bool score(const float* logits) {
        const auto count = static_cast<std::size_t>(routing_.experts);
        float most = -std::numeric_limits<float>::infinity();
        bool finite = true;
        for (std::size_t i = 0; i < count; ++i) {
            finite &= logits[i] < std::numeric_limits<float>::infinity();  // false for NaN
            if (logits[i] > most) most = logits[i];
        }
        if (!std::isfinite(most)) finite = false;
        const bool by_probability = routing_.correction || routing_.group_best > 1;
        if (routing_.sigmoid) {
            for (std::size_t i = 0; i < count; ++i) scores_[i] = sigmoid(logits[i]);
        } else if (finite && (by_probability || !routing_.normalized)) {
            int64_t units = 0;
            for (std::size_t i = 0; i < count; ++i) {
                scores_[i] = std::exp(logits[i] - most);
                units += std::llrint(static_cast<double>(scores_[i]) * kUnits);
            }
            const auto sum = static_cast<float>(static_cast<double>(units) / kUnits);
            for (std::size_t i = 0; i < count; ++i) scores_[i] /= sum;
        }
        // A softmax keeps the order, but makes some scores equal that differ.
        const bool by_scores = routing_.sigmoid || (finite && by_probability);
        for (std::size_t i = 0; i < count; ++i) keys_[i] = by_scores ? scores_[i] : logits[i];
        if (routing_.correction)
            for (std::size_t i = 0; i < count; ++i) keys_[i] += routing_.correction[i];
        return finite;
    }

    void leave_groups_out() {
        const int64_t size = routing_.experts / routing_.groups;
        for (int64_t group = 0; group < routing_.groups; ++group) {
            const float* keys = keys_.data() + group * size;
            uint8_t* taken = taken_.data() + group * size;
            float sum = 0;
            for (int64_t i = 0; i < routing_.group_best; ++i) {
                const int64_t best = best_left(keys, size, taken);
                taken[best] = 1;
                sum += keys[best];
            }
            std::fill(taken, taken + size, uint8_t{0});
            group_keys_[static_cast<std::size_t>(group)] = sum;
        }
        std::fill(group_taken_.begin(), group_taken_.end(), uint8_t{0});
        for (int64_t i = 0; i < routing_.top_groups; ++i) {
            const int64_t best =
                best_left(group_keys_.data(), routing_.groups, group_taken_.data());
            group_taken_[static_cast<std::size_t>(best)] = 1;
        }
        for (int64_t expert = 0; expert < routing_.experts; ++expert)
            taken_[static_cast<std::size_t>(expert)] =
                !group_taken_[static_cast<std::size_t>(expert / size)];
    }

    void weigh(const float* logits, const int32_t* ids, float* weights) const {
        const int64_t top_k = routing_.top_k;
        if (routing_.sigmoid || !routing_.normalized) {
            for (int64_t i = 0; i < top_k; ++i) weights[i] = scores_[static_cast<std::size_t>(ids[i])];
        } else {
            float most = logits[ids[0]];
            for (int64_t i = 1; i < top_k; ++i) most = std::fmax(most, logits[ids[i]]);
            for (int64_t i = 0; i < top_k; ++i) weights[i] = std::exp(logits[ids[i]] - most);
        }
        if (routing_.normalized) {
            float sum = 0;
            for (int64_t i = 0; i < top_k; ++i) sum += weights[i];
            for (int64_t i = 0; i < top_k; ++i) weights[i] /= sum + 1e-20f;
        }
        for (int64_t i = 0; i < top_k; ++i) weights[i] *= routing_.scale;
    }

    const Routing& routing_;
    std::vector<float> scores_;  // that weigh
    std::vector<float> keys_;    // that choose
    std::vector<uint8_t> taken_;
    std::vector<float> group_keys_;
    std::vector<uint8_t> group_taken_;
};

}  // namespace

void Routing::check() const {
    if (experts < 1) refuse("experts", "at least 1", experts);
    if (groups < 1 || experts % groups)
        refuse("groups", "a divisor of " + std::to_string(experts) + " experts", groups);
    if (top_groups < 1 || top_groups > groups)
        refuse("top_groups", "from 1 to " + std::to_string(groups), top_groups);
    if (group_best < 1 || group_best > experts / groups)
        refuse("group_best", "from 1 to " + std::to_string(experts / groups), group_best);
    const int64_t most = experts / groups * top_groups;
    if (top_k < 1 || top_k > most) refuse("top_k", "from 1 to " + std::to_string(most), top_k);
}

void append_routing(Phases& phases, const Routing& routing, const float* scores, int64_t rows,
                    int32_t* ids, float* weights) {
    const double each = kExp_ns + kLook_ns * static_cast<double>(routing.top_k);
    const double work = static_cast<double>(rows * routing.experts) * each;
    const Routing* kept = phases.keep(routing);
    phases.add_ranges(rows, work, [=](int64_t begin, int64_t end) {
        Choice choice(*kept);
        for (int64_t row = begin; row < end; ++row)
            choice.row(scores + row * kept->experts, ids + row * kept->top_k,
                       weights + row * kept->top_k);
    });
}

}  // namespace aioserve::mixture

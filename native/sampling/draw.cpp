#include "sampling/draw.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "common/thread_pool.h"
#include "dispatch.h"
#include "ops/types.h"
#include "sampling/noise.h"
#include "sampling/ranked.h"

namespace aioserve::sampling {
namespace {

using ops::Contenders;
using ops::Noise;
using ops::RowScale;
using ops::SamplingKernels;

// Nanoseconds per logit on one thread, roughly.
constexpr double kWork = 0.7;
// Logits that are gathered before there must be room for more.
constexpr int64_t kGatheredAtOnce = 4096;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.4426950408889634;
// log2 of more than the largest exponential.
constexpr float kWidestNoise = 6.0f;
// A list with so many times fewer entries than the row has is raced faster: each of its ids takes a
// call of Philox, which four of a row share.
constexpr int64_t kFewerInList = 3;
// More, by far, than bounds of scores, in powers of two, are rounded.
constexpr double kSlack = 1e-3;

// Memory of one thread, kept from row to row. It grows with the entries that can matter, seldom more
// than some thousands.
struct Workspace {
    std::vector<float> floats;
    Entries entries, kept;
    Ranked ranked, by_distance;
};

struct Limits {
    int64_t top_k;
    double top_p, min_p, typical_p;
};

class Row {
  public:
    Row(const SamplingKernels& kernels, const float* logits, int64_t vocab, float largest,
        double temperature, const Noise& noise, Workspace& work)
        : kernels_(kernels),
          logits_(logits),
          vocab_(vocab),
          temperature_(temperature),
          noise_(noise),
          work_(work) {
        constexpr double kMost = std::numeric_limits<float>::max();
        scale_ = {largest, static_cast<float>(std::min(kLog2E / temperature, kMost))};
    }

    int64_t draw(Limits limits) {
        return among_kept(limits, [this](const auto&... of_race) { return race(of_race...); });
    }

    // The probability of each token that may be drawn, over zeros.
    void weigh(Limits limits, float* probabilities) {
        among_kept(limits, [&](const float* logits, const int32_t* ids, int64_t count, float nearest,
                               const auto& takes_part) {
            const double shift = static_cast<double>(nearest) / kLog2E;
            double total = 0;
            for (int64_t place = 0; place < count; ++place) {
                if (!takes_part(place)) continue;
                const double power = shift - gap_of(logits[place]) / temperature_;
                const float weight = std::exp(static_cast<float>(power));
                probabilities[ids ? ids[place] : place] = weight;
                total += static_cast<double>(weight);
            }
            const float share = static_cast<float>(1 / total);
            for (int64_t place = 0; place < count; ++place)
                probabilities[ids ? ids[place] : place] *= share;
            return int64_t{0};
        });
    }

  private:
    // What `take` makes of the tokens that are kept: it is called once, as `race` is.
    template <class Take>
    int64_t among_kept(Limits limits, const Take& take) {
        const bool by_count = 0 < limits.top_k && limits.top_k < vocab_;
        if (!by_count && limits.top_p >= 1 && limits.min_p <= 0 && limits.typical_p >= 1)
            return take(logits_, nullptr, vocab_, 0, [](int64_t) { return true; });
        // Only a share of what `top_k` leaves has to know all that it leaves.
        const bool cut_late = by_count && limits.top_p < 1;
        const float widest = widest_gap(limits.min_p);
        double mass = 0;
        if (by_count) {
            const float most = cut_late ? ops::kWidestGap : widest;
            gather(std::max(floor_at(most), floor_of_first(limits.top_k)), most);
        } else if (limits.top_p < 1) {
            const double total = kernels_.sum_weights(logits_, vocab_, scale_);
            mass = limits.top_p * total;
            gather_nucleus(limits.top_p, total, widest);
        } else {
            gather(floor_at(widest), widest);
        }
        Ranked& ranked = work_.ranked;
        ranked.assign(work_.entries);
        if (by_count) {
            ranked.keep_first(limits.top_k);
            mass = limits.top_p * ranked.total();
        }
        if (limits.top_p < 1) ranked.keep_mass(mass);
        if (cut_late) ranked.keep_within(widest);
        if (limits.typical_p < 1) return take_typical(limits.typical_p, take);
        const Entries& entries = work_.entries;
        if (is_short(entries))
            return take(entries.logits.data(), entries.ids.data(), entries.count, 0,
                        [&ranked](int64_t place) { return ranked.keeps(place); });
        const Entry last = ranked.last();
        return take(logits_, nullptr, vocab_, 0, [&](int64_t id) {
            return logits_[id] > last.logit || (logits_[id] == last.logit && id <= last.id);
        });
    }

    // Id of the entry with the least score of those that take part. The nearest of these has about
    // the gap `nearest`; that of others may be anything. `ids` are null where they are the places.
    template <class Test>
    int64_t race(const float* logits, const int32_t* ids, int64_t count, float nearest,
                 const Test& takes_part) const {
        double best = std::numeric_limits<double>::infinity();
        int64_t winner = -1;
        float limit = nearest + kWidestNoise;
        Contenders found;
        for (int64_t begin = 0; begin < count; begin = found.next) {
            kernels_.find_contenders(logits, ids, begin, count, scale_, noise_, limit, found);
            for (int64_t i = 0; i < found.count; ++i) {
                const int64_t place = found.at[i];
                if (!takes_part(place)) continue;
                const int64_t id = ids ? ids[place] : place;
                const double gap = gap_of(logits[place]);
                const double score = std::log(exponential(noise_, id)) + gap / temperature_;
                if (score < best || (score == best && id < winner)) {
                    best = score;
                    winner = id;
                }
            }
            limit = static_cast<float>(std::min<double>(limit, best * kLog2E + kSlack));
        }
        return winner;
    }

    double gap_of(float logit) const {
        return static_cast<double>(scale_.largest) - static_cast<double>(logit);
    }

    // Whether a list of these is raced faster than the row.
    bool is_short(const Entries& entries) const { return entries.count < vocab_ / kFewerInList; }

    // Gap of a weight of min_p.
    static float widest_gap(double min_p) {
        if (min_p <= 0) return ops::kWidestGap;
        return static_cast<float>(std::min<double>(-std::log2(min_p), ops::kWidestGap));
    }

    // A logit that all with this gap or a smaller one reach, and few others: it is lowered by more
    // than gaps are rounded.
    float floor_at(double gap) const {
        const double logit = scale_.largest - gap * (1 + 1e-6) / scale_.factor;
        if (logit < -std::numeric_limits<float>::max()) return kMinusInfinity;
        return std::nextafter(static_cast<float>(logit), kMinusInfinity);
    }

    // What the `count` largest reach: `count` parts of the row have an entry at or above the
    // `count`-th largest of their maxima.
    float floor_of_first(int64_t count) const {
        auto& maxima = resized(work_.floats, ops::most_parts(vocab_));
        const int64_t parts = kernels_.part_maxima(logits_, vocab_, maxima.data());
        if (count > parts) return kMinusInfinity;
        const auto at = maxima.begin() + (count - 1);
        std::nth_element(maxima.begin(), at, maxima.begin() + parts, std::greater<float>());
        return *at;
    }

    // Entries that hold the nucleus of `share`, as far as it is within `widest`.
    void gather_nucleus(double share, double total, float widest) {
        // Entries below (1 - share) * total / vocab weigh less than 1 - share of the whole even
        // together, so the nucleus is complete without them. The bound is lowered by far more than
        // sums of float32 weights are off.
        const double weight = 0.99 * (1 - share) * total / static_cast<double>(vocab_);
        const float enough = static_cast<float>(std::min<double>(-std::log2(weight), widest));
        // Few entries near the largest often weigh as much already: hardly where the largest is a
        // small part of the whole.
        for (const float gap : {6.0f, 12.0f}) {
            if (gap >= enough) break;
            if (total > 4 * std::exp2(gap)) continue;
            gather(floor_at(gap), gap);
            const double sum =
                kernels_.sum_weights(work_.entries.logits.data(), work_.entries.count, scale_);
            // More, by far, than the sum is off.
            if (sum >= 1.0001 * share * total) return;
        }
        gather(floor_at(enough), widest);
    }

    // The entries with a weight that are at least `floor` and no wider apart than `widest`.
    void gather(float floor, float widest) {
        Entries& entries = work_.entries;
        entries.count = 0;
        for (int64_t begin = 0; begin < vocab_; begin += kGatheredAtOnce) {
            const int64_t end = std::min(begin + kGatheredAtOnce, vocab_);
            entries.reserve(entries.count + kGatheredAtOnce + 1);
            entries.count +=
                kernels_.gather(logits_, begin, end, floor, entries.ids.data() + entries.count,
                                entries.logits.data() + entries.count);
        }
        kernels_.weigh(entries.logits.data(), entries.count, scale_, entries.keys.data(),
                       entries.weights.data());
        keep(entries, [widest](float gap, float weight) { return weight > 0 && gap <= widest; });
    }

    // Most often that is all of them.
    template <class Test>
    static void keep(Entries& entries, const Test& test) {
        const float* const keys = entries.keys.data();
        const float* const weights = entries.weights.data();
        int dropped = 0;
        for (int64_t i = 0; i < entries.count; ++i) dropped += !test(keys[i], weights[i]);
        if (!dropped) return;
        int64_t count = 0;
        for (int64_t i = 0; i < entries.count; ++i) {
            const Entry entry = entries.at(i);
            entries.set(count, entry);
            count += test(entry.key, entry.weight);
        }
        entries.count = count;
    }

    // `take` part of what is kept, which has the entropy H: the tokens whose -log(p) is nearest
    // to H, until they weigh `share`, and all that are as near as the last. In units of gaps: H less
    // the gap of p = 1 is the mean gap, so distances are those of gaps to their mean.
    template <class Take>
    int64_t take_typical(double share, const Take& take) {
        Entries& kept = work_.kept;
        work_.ranked.copy_kept(kept);
        double total = 0, sum = 0;
        for (int64_t i = 0; i < kept.count; ++i) {
            total += static_cast<double>(kept.weights[i]);
            sum += static_cast<double>(kept.weights[i]) * static_cast<double>(kept.keys[i]);
        }
        const double mean = sum / total;
        const auto distance = [mean](float gap) {
            return static_cast<float>(std::abs(static_cast<double>(gap) - mean));
        };
        Entries& entries = work_.entries;
        entries.reserve(kept.count);
        entries.count = kept.count;
        for (int64_t i = 0; i < kept.count; ++i) {
            Entry entry = kept.at(i);
            entry.key = distance(entry.key);
            entries.set(i, entry);
        }
        work_.by_distance.assign(entries);
        const float widest = work_.by_distance.keep_mass(share * work_.by_distance.total());
        keep(kept, [=](float gap, float) { return distance(gap) <= widest; });
        float nearest = ops::kWidestGap;
        for (int64_t i = 0; i < kept.count; ++i) nearest = std::min(nearest, kept.keys[i]);
        const auto all = [](int64_t) { return true; };
        if (is_short(kept))
            return take(kept.logits.data(), kept.ids.data(), kept.count, nearest, all);
        auto& row = work_.floats;
        row.assign(static_cast<std::size_t>(vocab_), kMinusInfinity);
        for (int64_t i = 0; i < kept.count; ++i) row[kept.ids[i]] = kept.logits[i];
        return take(row.data(), nullptr, vocab_, nearest, all);
    }

    template <class T>
    static std::vector<T>& resized(std::vector<T>& vector, int64_t size) {
        if (static_cast<int64_t>(vector.size()) < size)
            vector.resize(static_cast<std::size_t>(size));
        return vector;
    }

    const SamplingKernels& kernels_;
    const float* logits_;
    int64_t vocab_;
    double temperature_;
    RowScale scale_{};
    const Noise& noise_;
    Workspace& work_;
};

// Calls `each(row, limits, at)` for each row to draw from, on the thread pool where that is faster.
template <class Each>
void for_rows(const DrawArgs& args, const Each& each) {
    const SamplingKernels& sampling = aioserve::kernels(ops::DType::float32).sampling;
    const auto one = [&](int64_t i) {
        thread_local Workspace work;
        const int64_t at = args.drawn[i];
        const Noise noise = noise_of(args.seeds[at], args.positions[at]);
        Row row(sampling, args.logits + at * args.vocab, args.vocab, args.largest[at],
                args.temperatures[at], noise, work);
        const Limits limits{args.top_ks[at], args.top_ps[at], args.min_ps[at], args.typical_ps[at]};
        each(row, limits, at);
    };
    const double work = kWork * static_cast<double>(args.num_drawn * args.vocab);
    if (work < kParallelThreshold) {
        for (int64_t i = 0; i < args.num_drawn; ++i) one(i);
    } else {
        parallel_for(args.num_drawn, one);
    }
}

}  // namespace

void draw(const DrawArgs& args, int64_t* token_ids) {
    for_rows(args, [&](Row& row, const Limits& limits, int64_t at) {
        token_ids[at] = row.draw(limits);
    });
}

void weigh(const DrawArgs& args, float* probabilities) {
    for_rows(args, [&](Row& row, const Limits& limits, int64_t at) {
        row.weigh(limits, probabilities + at * args.vocab);
    });
}

}  // namespace aioserve::sampling

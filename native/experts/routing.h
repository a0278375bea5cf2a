// Which experts each row goes to, and with which weights, from a router's scores.

#pragma once

#include <cstdint>

#include "common/phases.h"

namespace aioserve::mixture {

struct Routing {
    int64_t experts;
    int64_t top_k;
    bool sigmoid;      // a row's scores become sigmoids, each by itself; else a softmax over all
    bool normalized;   // the weights of the chosen are divided by their sum
    float scale;       // a factor on the weights
    int64_t groups;    // of neighbouring experts
    int64_t top_groups;  // groups whose experts can be chosen
    int64_t group_best;  // a group's score is the sum of so many of its experts' best
    const float* correction;  // [experts], added to what chooses, not to what weighs; or null

    // Throws std::invalid_argument naming what doesn't fit.
    void check() const;
};

// ids [rows, top_k] by falling score, of equal ones the lowest id first; weights [rows, top_k]. What
// a row gets depends on its scores [experts] alone, and not on the order of the experts, to the bit,
// unless scores are equal. NaN or +inf among the scores, or nothing but -inf, makes all weights of the
// row NaN.
void append_routing(Phases& phases, const Routing& routing, const float* scores, int64_t rows,
                    int32_t* ids, float* weights);

}  // namespace aioserve::mixture

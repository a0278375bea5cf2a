// Draws of tokens from rows of logits: temperature, top_k, top_p, min_p and typical_p, as
// `aioserve/sampling/sampler.py` defines them. Nothing here sorts a whole row:
//
// - where nothing is left out, the cumulative distribution is inverted in two levels, over the sums
//   of interleaved parts of the row first, and inside one part then;
// - otherwise a cheap bound first leaves the entries that can matter (`Ranked`).
//
// Each row is worked out by itself, by one thread.

#pragma once

#include <cstdint>

namespace aioserve::sampling {

struct DrawArgs {
    const float* logits;  // [rows, vocab] contiguous
    int64_t vocab;
    const float* largest;  // of each row
    const double* temperatures;
    const int64_t* top_ks;
    const double* top_ps;
    const double* min_ps;
    const double* typical_ps;
    const int64_t* drawn;    // rows to draw from, with finite `largest` and temperatures above 0
    const double* uniforms;  // in [0, 1), one for each of `drawn`
    int64_t num_drawn;
    int64_t* token_ids;  // one for each row; only those of `drawn` are written
};

// On the thread pool.
void draw(const DrawArgs& args);

}  // namespace aioserve::sampling

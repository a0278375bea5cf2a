// Draws of tokens from rows of logits: temperature, top_k, top_p, min_p and typical_p, as
// `aioserve/sampling/sampler.py` defines them. Nothing here sorts a whole row:
// where something is left out, a cheap bound first leaves the entries that can matter (`Ranked`).
//
// Of what is kept, token i with the gap g to the largest logit and the exponential E has the score
// log(E) + g / temperature, in float64; the least score wins, the lowest id among equals. Few tokens
// need one: a bound from 24 bits, for a vector at once, rules the others out.
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
    const uint64_t* seeds;
    const uint64_t* positions;
    const int64_t* drawn;  // rows to draw from, with finite `largest` and temperatures above 0
    int64_t num_drawn;
};

// On the thread pool: a token for each row, of which only those of `drawn` are written.
void draw(const DrawArgs& args, int64_t* token_ids);

// On the thread pool: the probability with which `draw` takes each token, [rows, vocab], of which
// only those above 0 are written.
void weigh(const DrawArgs& args, float* probabilities);

}  // namespace aioserve::sampling

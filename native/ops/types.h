// What the op drivers hand to the kernels of one instruction set. Plain data, no code.

#pragma once

#include <cstdint>

#include "simd/bf16.h"

namespace aioserve::ops {

enum class DType : int { float32 = 0, bfloat16 = 1 };

// Scores are computed for blocks of this many keys, which start at multiples of it in the sequence,
// and sums run in order of position. Partial results are merged at multiples of `kSplitKeys`, on
// every path. What a row computes so depends on its own sequence and position alone: not on its
// neighbours in the batch, the threads, the page size, or where a prefill was cut into chunks.
constexpr int kKeyBlock = 128;
constexpr int kSplitKeys = 512;
// Query rows (tokens x grouped heads) that share one pass over the keys, unless one token has more.
constexpr int kRowBlock = 64;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxLatentDim = 1024;

struct AttentionArgs {
    const void* q;  // [T, Hq, D] with these strides, in elements
    int64_t q_token_stride;
    int64_t q_head_stride;
    void* out;  // [T or S, Hq, value_dim] contiguous
    const char* k_pages;  // of this layer in page 0, as in KVPages
    const char* v_pages;
    int64_t page_bytes;  // from page to page
    int64_t head_bytes;  // from KV head to KV head
    // Pages of latents hold rows of `head_dim` numbers, in whole steps of 4 bytes, a token's after the
    // other's: keys, whose first `value_dim` numbers are the values. There is one KV head.
    bool latent;
    int64_t kv_heads;
    int64_t group;  // query heads per KV head
    int64_t head_dim;   // of queries and keys
    int64_t value_dim;  // of values and results: as many, unless pages are latent
    int64_t page_size;
    float scale;
    float soft_cap;
    int64_t window;      // 0: none
    const float* sinks;  // [Hq] or null
    float* log_sum_exp;  // [T or S, Hq] or null
};

// Two results of attention from the same queries over different keys become one, in `out`. A part
// whose log-sum-exp is -inf saw no key: what it holds is never read.
struct MergeAttentionArgs {
    void* out;            // [T * Hq, D] contiguous, and ...
    float* log_sum_exp;   // ... [T * Hq]
    const void* part;     // likewise
    const float* part_log_sum_exp;
    int64_t head_dim;
};

// Some query tokens of a sequence, in order, and the query heads of one KV head.
struct AttentionUnit {
    const int32_t* pages;  // the sequence's page table, read from the page of the first key on
    const int64_t* rows;   // of the tokens in the batch; null: those from `first_row` on
    int64_t first_row;     // of the output
    int64_t index;         // of the first token's entry
    int32_t tokens;
    int32_t kv_head;
    int64_t first_key;  // keys that any row attends: [first_key, end_key)
    int64_t end_key;

    int64_t first_split() const { return first_key / kSplitKeys; }
    int64_t num_splits() const { return (end_key - 1) / kSplitKeys - first_split() + 1; }
};

struct RmsNormArgs {
    const void* x;  // [T, size], rows dense
    int64_t x_stride;
    void* residual;  // [T, size] contiguous, or null: then x itself is normalised
    const void* weight;
    void* out;  // [T, size], which may be x itself
    int64_t out_stride;
    int64_t size;
    float eps;
    float weight_offset;
};

struct LayerNormArgs {
    const void* x;  // [T, size], rows dense
    int64_t x_stride;
    void* residual;  // as for RmsNormArgs
    const void* weight;
    const void* bias;  // or null
    void* out;         // [T, size] contiguous
    int64_t size;
    float eps;
};

struct RotaryArgs {
    void* q;  // [T, Hq, D] with these strides, in elements; likewise k and v
    const void* k;
    const void* v;
    int64_t q_token_stride, q_head_stride;
    int64_t k_token_stride, k_head_stride;
    int64_t v_token_stride, v_head_stride;
    int64_t q_heads, kv_heads, head_dim;
    const float* cos;  // [max_positions, half], or null for no rotation
    const float* sin;
    int64_t half;
    bool interleaved;          // dimensions 2 i and 2 i + 1 are a pair, or else i and i + half
    const float* query_scale;  // [max_positions]: factors on queries, or null
    const int32_t* positions;
    const int64_t* slots;
    char* k_pages;  // of this layer in page 0, as in KVPages
    char* v_pages;
    int64_t page_bytes;  // from page to page
    int64_t head_bytes;  // from KV head to KV head
    int64_t page_size;
    const void* q_norm;  // [D] or null
    const void* k_norm;
    float eps;
    float weight_offset;
};

struct LatentArgs {
    void* queries;  // [T, Hq, rank + rotated], tokens `query_stride` elements apart
    int64_t query_stride, q_heads;
    const void* latents;  // [T, rank + rotated], rows `latent_stride` elements apart
    int64_t latent_stride;
    int64_t rank, rotated;
    const void* norm;  // [rank]
    float eps;
    float weight_offset;
    const float* cos;  // as for RotaryArgs
    const float* sin;
    int64_t half;
    bool interleaved;
    const int32_t* positions;
    const int64_t* locations;
    char* pages;  // of this layer in page 0, as in KVPages
    int64_t page_bytes;  // from page to page
    int64_t page_size;
};

struct GatedArgs {
    const void* gate_up;  // [T, 2 * size], rows dense
    int64_t stride;
    void* out;  // [T, size] contiguous
    int64_t size;
    float gain = 0, limit = 0;  // of `clamped_swiglu` alone
};

// What a layer does to each number where it has no gate.
enum class Activation : int { gelu_tanh, gelu, relu_squared };
constexpr int kNumActivations = 3;

struct ActivationArgs {
    const void* x;  // [T, size], rows dense
    int64_t stride;
    void* out;  // [T, size] contiguous
    int64_t size;
};

// x[row] += table[ids[row]], or table[row] where ids are null; in place.
struct AddRowsArgs {
    void* x;            // [T, size] contiguous
    const void* table;  // [rows, size] contiguous
    const int32_t* ids;
    int64_t size;
};

// The first of the largest values of a row, or its first NaN.
struct Largest {
    float value;
    int64_t index;
};

// How logits of a row become weights: an entry's gap is (largest - x) * factor, cut off at kWidestGap,
// and its weight 2^-gap, 0 from about a gap of 125.5 on. Gaps never fall where logits fall.
struct RowScale {
    float largest;  // of the row's logits, finite
    float factor;   // positive and finite
};
constexpr float kWidestGap = 127.0f;

// What a row's random words depend on beside a token's id: the position, and each round's key of
// Philox4x32-10, which come from the seed.
struct Noise {
    uint32_t position[2];
    uint32_t keys[10][2];
};
// Each call of Philox gives a word to each of four tokens: call 16 b + l to those at 64 b + 16 j + l,
// with j the word's number. Its counter is the position, the call, and whether the words are the upper
// or the lower half of 64 random bits.
constexpr int64_t kRaceBlock = 64;  // tokens whose words come from neighbouring calls
constexpr int64_t kRaceCalls = kRaceBlock / 4;
constexpr uint32_t kUpperWords = 1, kLowerWords = 2;

// Places of entries that may have the least score of a race.
struct Contenders {
    int64_t next;  // where to look further
    int64_t count;
    int64_t at[kRaceBlock];
};

static constexpr int64_t most_parts(int64_t size) { return size / 32 + 16; }

// The kernels of draws. Logits are float32, and finite or -inf.
struct SamplingKernels {
    double (*sum_weights)(const float* row, int64_t size, const RowScale&);
    void (*weigh)(const float* logits, int64_t size, const RowScale&, float* gaps, float* weights);
    // The largest of each of some parts, whose number it returns: at most `most_parts`. Which entries
    // a part has is the instruction set's affair.
    int64_t (*part_maxima)(const float* row, int64_t size, float* maxima);
    // Appends the entries of [begin, end) that are at least `floor`, by rising id, and returns how
    // many. There is room for all, and for one more.
    int64_t (*gather)(const float* row, int64_t begin, int64_t end, float floor, int32_t* ids,
                      float* logits);
    // Looks at blocks of entries from `begin`, a multiple of kRaceBlock, on until one has entries
    // whose gap plus log2 of their exponential may be at most `limit`. All that are are found, and
    // some that aren't. `ids` are null where they are the places.
    void (*find_contenders)(const float* logits, const int32_t* ids, int64_t begin, int64_t size,
                            const RowScale&, const Noise&, float limit, Contenders&);
};

// Floats that a partial result of an attention unit takes: of each row the maximum score, the sum of
// the weights and the weighted values, in whole vectors or tiles of any instruction set.
constexpr int64_t kPartialAlignment = 16;
static constexpr int64_t partial_floats(int64_t rows, int64_t head_dim) {
    const int64_t padded = (head_dim + kPartialAlignment - 1) / kPartialAlignment;
    const int64_t sums = (2 * rows + kPartialAlignment - 1) / kPartialAlignment;
    const int64_t padded_rows = (rows + kPartialAlignment - 1) / kPartialAlignment * kPartialAlignment;
    return (sums + padded_rows * padded) * kPartialAlignment;
}

// Where rows of one pass over a split leave their partials: so many tokens, in order, in each slot.
struct PartialPlace {
    int64_t tokens, slot;
};
struct PartialPlaces {
    const PartialPlace* places;
    int64_t count;
    float* partials;
    int64_t stride;  // floats from slot to slot
};

// The kernels of one dtype. All are free of side effects but for their outputs, and never throw.
struct Kernels {
    void (*rms_norm)(const RmsNormArgs&, int64_t begin, int64_t end);
    void (*layer_norm)(const LayerNormArgs&, int64_t begin, int64_t end);
    void (*rotary_kv_write)(const RotaryArgs&, int64_t begin, int64_t end);
    void (*latent_write)(const LatentArgs&, int64_t begin, int64_t end);
    void (*silu_mul)(const GatedArgs&, int64_t begin, int64_t end);
    void (*gelu_tanh_mul)(const GatedArgs&, int64_t begin, int64_t end);
    // (up + 1) * gate * sigmoid(gain * gate), where gate is at most `limit`, and up within it.
    void (*clamped_swiglu)(const GatedArgs&, int64_t begin, int64_t end);
    void (*activation[kNumActivations])(const ActivationArgs&, int64_t begin, int64_t end);
    void (*add_rows)(const AddRowsArgs&, int64_t begin, int64_t end);
    // Elements [begin, end) of x become x * factor.
    void (*scale)(void* x, float factor, int64_t begin, int64_t end);
    // Elements of float32, whatever the dtype, become cap * tanh(x / cap).
    void (*soft_cap)(float* x, float cap, int64_t begin, int64_t end);
    Largest (*largest)(const float* row, int64_t size);
    // Elements of float32 become -inf where bit `i % 32` of word `i / 32` isn't set.
    void (*leave_out)(const int32_t* mask, float* row, int64_t size);
    SamplingKernels sampling;  // of float32, whatever the dtype
    // All splits of a unit, merged and written to `out`. `next`, unless null, is what this thread
    // probably does next: its first keys are fetched on the way.
    void (*attention)(const AttentionArgs&, const AttentionUnit&, const AttentionUnit* next);
    // A unit whose keys are of one split: the partials of its rows go to the places, in order.
    void (*attention_split)(const AttentionArgs&, const AttentionUnit&, const AttentionUnit* next,
                            const PartialPlaces&);
    // The partials of all splits of a unit, `stride` floats apart, merged and written to `out`.
    void (*attention_merge)(const AttentionArgs&, const AttentionUnit&, float* partials,
                            int64_t stride);
    void (*merge_attention)(const MergeAttentionArgs&, int64_t begin, int64_t end);
};

// The tables that an instruction set offers; `kernels_*.cpp` each define one.
struct Table {
    Kernels float32;
    Kernels bfloat16;
};

}  // namespace aioserve::ops

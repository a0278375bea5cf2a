// The ops of a decoder, recorded once and run for every step by one call: the CPU's counterpart of a
// CUDA graph.
//
// An op names values: matrices with a row for each token, or for each whose logits are
// wanted. Their memory is an
// arena, in which values that are never alive together share a place. A run puts the phases of all
// ops together and hands them to the thread pool in one go, or in as many as there are ops whose rows
// depend on what was computed. An op that works row by row and whose
// result only the next linear layer reads is fused into it: its rows are computed where they are
// packed, and never lie in memory.

#pragma once

#include <array>
#include <memory>

#include "experts/experts.h"
#include "experts/routing.h"
#include "linear/per_head.h"
#include "program/op.h"

namespace aioserve::program {

class Program {
  public:
    // For KV pages of this dtype, with this many heads of this size; `rank` as in KVPages.
    Program(ops::DType dtype, int64_t kv_heads, int64_t head_dim, int64_t rank)
        : dtype_(dtype), kv_heads_(kv_heads), head_dim_(head_dim), rank_(rank) {}

    // Recording. Each returns its result; addresses must outlive the program. Throws
    // std::invalid_argument for values that don't exist or don't fit.
    ValueId embedding(const void* table, int64_t vocab, int64_t columns);
    ValueId packed_embedding(const linear::LinearKernel& table, int64_t vocab, int64_t columns);
    // The rows that each run is given: once in a program.
    ValueId hidden_in(int64_t columns);
    void add_positions(ValueId x, const void* table, int64_t positions);
    void add(ValueId x, ValueId y);
    void scale(ValueId x, float factor);
    ValueId linear(ValueId x, const linear::LinearKernel& weight, int64_t in_features,
                   int64_t out_features, bool float32);
    // `residual`: added to in place first, unless kNoValue.
    ValueId rms_norm(ValueId x, ValueId residual, const void* weight, float eps,
                     float weight_offset);
    // Of `size` columns of x from `first` on, in their place.
    void norm_columns(ValueId x, int64_t first, int64_t size, const void* weight, float eps,
                      float weight_offset);
    ValueId layer_norm(ValueId x, ValueId residual, const void* weight, const void* bias,
                       float eps);
    int add_rotation(int64_t half, bool interleaved);
    void set_rotation(int index, const float* cos, const float* sin, const float* query_scale,
                      int64_t max_positions);
    struct HeadNorms {
        const void* query;
        const void* key;
        float eps, weight_offset;
    };
    // `rotation`: an index, or -1.
    void rotary_kv_write(ValueId qkv, int64_t layer, int rotation, const HeadNorms& norms);
    struct LatentNorm {
        const void* weight;
        float eps, weight_offset;
    };
    // Takes the place of `rotary_kv_write` where pages have a rank: `queries` [T, Hq * D], `latents`
    // [T, D].
    void latent_write(ValueId queries, ValueId latents, int64_t layer, int rotation,
                      const LatentNorm& norm);
    // `qkv`: queries alone where pages have a rank. `sinks`: of each query head, or null.
    ValueId attention(ValueId qkv, int64_t layer, float scale, float soft_cap, int64_t window,
                      const float* sinks, bool logit_rows_only);
    ValueId per_head(ValueId x, const linear::PerHeadKernel& weight);
    ValueId gated(ValueId gate_up, bool gelu);
    // The sum of the experts of each row of x that its scores choose.
    ValueId experts(ValueId x, ValueId scores, const mixture::Experts& experts,
                    const mixture::Routing& routing);
    void sigmoid_scale(ValueId x, ValueId gate);
    ValueId activation(ValueId x, ops::Activation kind);
    ValueId logit_rows(ValueId x);
    void soft_cap(ValueId x, float cap);
    // x and y side by side, both of the program's dtype.
    ValueId concat(ValueId x, ValueId y);
    // Columns of x, which is float32, to others of `size`, which are -inf where none of x's goes.
    ValueId scatter_columns(ValueId x, const int64_t* columns, int64_t size);
    // Copies x, which has the program's dtype, to the columns from `column` on of what a run keeps:
    // of each token or of each logit row, the same in all of a program.
    void tap(ValueId x, int64_t column);

    // Ends the recording: `logits` is what a run leaves. Fuses and places.
    void finish(ValueId logits);

    // One step. Where the largest of each row are asked for, and the logits are a linear layer's as
    // they are, those that aren't are never written. Throws, before anything is written, std::out_of_range for a
    // token that the embedding doesn't have and std::invalid_argument for what else doesn't fit.
    void run(const Inputs& inputs, const Outputs& outputs);

    bool keeps_logit_rows() const { return keeps_logit_rows_; }
    int64_t num_ops() const { return static_cast<int64_t>(ops_.size()); }
    std::size_t arena_bytes() const { return arena_size_; }

    // Nanoseconds per kind of all runs since measuring began.
    void measure(bool on);
    const std::array<int64_t, kNumKinds>& nanoseconds() const { return nanoseconds_; }

  private:
    ValueId add_value(bool logit_rows_only, int64_t columns, bool float32 = false);
    const Value& check(ValueId id) const;
    int64_t check_qkv(ValueId qkv, int64_t layer);  // returns the number of query heads
    void check_inputs(const Inputs& inputs) const;
    void check_states(const Inputs& inputs, const Outputs& outputs) const;
    bool is_own_dtype(const Value& value) const;
    void fuse();
    void place();
    void lay_out(const Inputs& inputs, float* logits);
    void append_ops(const Frame& frame, const Outputs& outputs);
    void run_phases();  // those so far, which are gone then

    struct FreeMemory {
        std::size_t size;
        void operator()(char* memory) const;
    };

    ops::DType dtype_;
    int64_t kv_heads_;
    int64_t head_dim_;
    int64_t rank_;
    int64_t layers_ = 0;
    std::vector<Value> values_;
    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<Rotation> rotations_;
    int64_t vocab_ = 0;      // of the embedding
    int64_t given_columns_ = 0;
    int64_t state_columns_ = 0;
    bool keeps_logit_rows_ = false;
    int64_t positions_ = 0;  // of learned positions; 0: none
    ValueId logits_ = kNoValue;

    struct Place {
        int64_t bytes_per_token = 0, bytes_per_logit_row = 0;
        char* address = nullptr;
    };
    std::vector<Place> places_;
    std::vector<int> place_of_;  // value -> place; -1 where it never lies in memory

    std::vector<char*> addresses_;
    std::unique_ptr<char[], FreeMemory> arena_{nullptr, {0}};
    std::size_t arena_size_ = 0;
    Phases phases_;
    linear::AlignedMemory own_memory_;
    bool measured_ = false;
    std::vector<Kind> kinds_;  // of phases
    std::vector<int64_t> ended_;
    std::array<int64_t, kNumKinds> nanoseconds_{};
};

}  // namespace aioserve::program

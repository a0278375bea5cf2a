// The ops that programs are made of. Each keeps what of it is the same in every step.

#pragma once

#include <memory>

#include "experts/experts.h"
#include "experts/routing.h"
#include "linear/per_head.h"
#include "ops/attention.h"
#include "program/op.h"

namespace aioserve::program {

// Rows of a plain table, by token id.
struct PickTokens : Op {
    PickTokens(ValueId to, const void* table_)
        : Op(Kind::rowwise, {}, {to}), table(table_) {}
    void append(const Frame& frame) const override;
    const void* table;
};

// Rows of a linear layer's weight, by token id.
struct PickPackedTokens : Op {
    PickPackedTokens(ValueId to, const linear::LinearKernel& table_)
        : Op(Kind::rowwise, {}, {to}), table(table_) {}
    void append(const Frame& frame) const override;
    const linear::LinearKernel& table;
};

// Rows that a run is given beside its tokens.
struct HiddenIn : Op {
    explicit HiddenIn(ValueId to) : Op(Kind::rowwise, {}, {to}) {}
    void append(const Frame& frame) const override;
};

struct AddPositions : Op {
    AddPositions(ValueId x, const void* table_) : Op(Kind::rowwise, {x}, {}), table(table_) {}
    void append(const Frame& frame) const override;
    const void* table;
};

// x += y.
struct Add : Op {
    Add(ValueId x, ValueId y) : Op(Kind::rowwise, {x, y}, {}) {}
    void append(const Frame& frame) const override;
};

struct Scale : Op {
    Scale(ValueId x, float factor_) : Op(Kind::rowwise, {x}, {}), factor(factor_) {}
    void append(const Frame& frame) const override;
    float factor;
};

struct SoftCap : Op {
    SoftCap(ValueId x, float cap_) : Op(Kind::rowwise, {x}, {}), cap(cap_) {}
    void append(const Frame& frame) const override;
    float cap;
};

struct PickLogitRows : Op {
    PickLogitRows(ValueId from_, ValueId to_) : Op(Kind::rowwise, {from_}, {to_}) {}
    void append(const Frame& frame) const override;
};

// The columns of x, then those of y.
struct Concat : Op {
    Concat(ValueId x, ValueId y, ValueId out) : Op(Kind::rowwise, {x, y}, {out}) {}
    void append(const Frame& frame) const override;
};

// Column i of x becomes column columns[i], which differ; the others are -inf.
struct ScatterColumns : Op {
    ScatterColumns(ValueId x, ValueId out, const int64_t* columns_)
        : Op(Kind::rowwise, {x}, {out}), columns(columns_) {}
    void append(const Frame& frame) const override;
    const int64_t* columns;
};

// Copies x to some columns of what is kept of the step.
struct Tap : Op {
    Tap(ValueId x, int64_t column_) : Op(Kind::rowwise, {x}, {}), column(column_) {}
    void append(const Frame& frame) const override;
    int64_t column;
};

struct RmsNorm : Op {
    RmsNorm(ValueId x_, ValueId residual_, ValueId out_, const void* weight_, float eps_,
            float offset_);
    void append(const Frame& frame) const override;
    bool is_row_source() const override { return true; }
    linear::RowSource row_source(const Frame& frame) const override;
    ops::RmsNormArgs args(const Frame& frame) const;
    ValueId x, residual, out;
    const void* weight;
    float eps, offset;
};

// The norm of some columns of x, in their place.
struct ColumnsNorm : Op {
    ColumnsNorm(ValueId x, int64_t first_, int64_t size_, const void* weight_, float eps_,
                float offset_)
        : Op(Kind::rowwise, {x}, {}), first(first_), size(size_), weight(weight_), eps(eps_),
          offset(offset_) {}
    void append(const Frame& frame) const override;
    int64_t first, size;
    const void* weight;
    float eps, offset;
};

struct LayerNorm : Op {
    LayerNorm(ValueId x_, ValueId residual_, ValueId out_, const void* weight_, const void* bias_,
              float eps_);
    void append(const Frame& frame) const override;
    bool is_row_source() const override { return true; }
    linear::RowSource row_source(const Frame& frame) const override;
    ops::LayerNormArgs args(const Frame& frame) const;
    ValueId x, residual, out;
    const void* weight;
    const void* bias;
    float eps;
};

struct Gated : Op {
    Gated(ValueId gate_up_, ValueId out_, bool gelu_)
        : Op(Kind::rowwise, {gate_up_}, {out_}), gelu(gelu_) {}
    void append(const Frame& frame) const override;
    bool is_row_source() const override { return true; }
    linear::RowSource row_source(const Frame& frame) const override;
    ops::GatedArgs args(const Frame& frame) const;
    bool gelu;
};

struct Activation : Op {
    Activation(ValueId x_, ValueId out_, ops::Activation kind_)
        : Op(Kind::rowwise, {x_}, {out_}), function(kind_) {}
    void append(const Frame& frame) const override;
    bool is_row_source() const override { return true; }
    linear::RowSource row_source(const Frame& frame) const override;
    ops::ActivationArgs args(const Frame& frame) const;
    ops::Activation function;
};

struct Linear : Op {
    Linear(ValueId x, ValueId y, const linear::LinearKernel& weight_, bool float32_)
        : Op(Kind::linear, {x}, {y}), weight(weight_), float32(float32_) {}
    std::size_t scratch_bytes(const Frame& frame) const override;
    void append(const Frame& frame) const override;
    // Of each row of y the largest, and its column, and of y no more than the rows that are kept.
    void append_argmax(const Frame& frame, const Outputs& outputs) const;
    linear::RowSource rows(const Frame& frame) const;
    // The op that computes x from now on.
    void fuse(std::unique_ptr<Op> before);
    const linear::LinearKernel& weight;
    bool float32;
    std::unique_ptr<Op> source;
};

// The experts that each row goes to, and their weights.
struct Route : Op {
    Route(ValueId scores, ValueId ids, ValueId weights, const mixture::Routing& routing_)
        : Op(Kind::rowwise, {scores}, {ids, weights}), routing(routing_) {}
    void append(const Frame& frame) const override;
    mixture::Routing routing;
};

struct Experts : Op {
    Experts(ValueId x, ValueId ids, ValueId weights, ValueId out, const mixture::Experts& experts_)
        : Op(Kind::linear, {x, ids, weights}, {out}), experts(experts_) {}
    bool reads_results() const override { return true; }
    void append(const Frame& frame) const override;
    const mixture::Experts& experts;
};

// x *= sigmoid(gate), a number for each row.
struct SigmoidScale : Op {
    SigmoidScale(ValueId x, ValueId gate) : Op(Kind::rowwise, {x, gate}, {}) {}
    void append(const Frame& frame) const override;
};

struct PerHead : Op {
    PerHead(ValueId x, ValueId y, const linear::PerHeadKernel& weight_)
        : Op(Kind::linear, {x}, {y}), weight(weight_) {}
    void append(const Frame& frame) const override;
    const linear::PerHeadKernel& weight;
};

struct LatentWrite : Op {
    LatentWrite(ValueId queries, ValueId latents, int64_t layer_, int64_t q_heads_, int rotation_,
                const void* norm_, float eps_, float offset_)
        : Op(Kind::attention, {queries, latents}, {}), layer(layer_), q_heads(q_heads_),
          rotation(rotation_), norm(norm_), eps(eps_), offset(offset_) {}
    void append(const Frame& frame) const override;
    int64_t layer, q_heads;
    int rotation;
    const void* norm;
    float eps, offset;
};

struct RotaryKvWrite : Op {
    RotaryKvWrite(ValueId qkv, int64_t layer_, int64_t q_heads_, int rotation_,
                  const void* q_norm_, const void* k_norm_, float eps_, float offset_)
        : Op(Kind::attention, {qkv}, {}), layer(layer_), q_heads(q_heads_), rotation(rotation_),
          q_norm(q_norm_), k_norm(k_norm_), eps(eps_), offset(offset_) {}
    void append(const Frame& frame) const override;
    int64_t layer, q_heads;
    int rotation;
    const void* q_norm;
    const void* k_norm;
    float eps, offset;
};

struct Attention : Op {
    Attention(ValueId qkv, ValueId out, int64_t layer_, int64_t q_heads_, float scale_,
              float soft_cap_, int64_t window_, const float* sinks_)
        : Op(Kind::attention, {qkv}, {out}), layer(layer_), q_heads(q_heads_), scale(scale_),
          soft_cap(soft_cap_), window(window_), sinks(sinks_) {}
    std::size_t scratch_bytes(const Frame& frame) const override;
    void append(const Frame& frame) const override;
    ops::AttentionCall call(const Frame& frame) const;
    int64_t layer, q_heads;
    float scale, soft_cap;
    int64_t window;
    const float* sinks;
};

}  // namespace aioserve::program

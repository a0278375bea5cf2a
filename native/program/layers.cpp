#include "program/layers.h"

#include "dispatch.h"
#include "ops/elementwise.h"
#include "ops/latent.h"
#include "ops/rowwise.h"

namespace aioserve::program {
namespace {

std::vector<ValueId> present(ValueId a, ValueId b) {
    return b == kNoValue ? std::vector<ValueId>{a} : std::vector<ValueId>{a, b};
}

std::size_t round_up(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t elements(const Frame& frame, ValueId id) {
    return frame.rows(id) * frame.values[id].columns;
}

// A row source that runs `kernel` on one row of `args`, which `move` points at it and at the memory.
template <class Args, class Move>
linear::RowSource one_row(const Frame& frame, const Args& args, void (*kernel)(const Args&, int64_t, int64_t),
                          Move) {
    struct Context {
        Args args;
        void (*kernel)(const Args&, int64_t, int64_t);
        int64_t row_bytes;
    };
    const int64_t element = frame.dtype == ops::DType::bfloat16 ? 2 : 4;
    const auto* context = frame.phases.keep(Context{args, kernel, element});
    return {[](const void* kept, int64_t row, char* memory) -> const char* {
                const Context& c = *static_cast<const Context*>(kept);
                Args moved = c.args;
                Move()(moved, row, c.row_bytes);
                moved.out = memory;
                c.kernel(moved, 0, 1);
                return memory;
            },
            context, 0};
}

const void* moved(const void* rows, int64_t bytes) {
    return static_cast<const char*>(rows) + bytes;
}

struct MoveNorm {
    template <class Args>
    void operator()(Args& args, int64_t row, int64_t element) const {
        args.x = moved(args.x, row * args.x_stride * element);
        if (args.residual)
            args.residual = static_cast<char*>(args.residual) + row * args.size * element;
    }
};

struct MoveGated {
    void operator()(ops::GatedArgs& args, int64_t row, int64_t element) const {
        args.gate_up = moved(args.gate_up, row * args.stride * element);
    }
};

struct MoveActivation {
    void operator()(ops::ActivationArgs& args, int64_t row, int64_t element) const {
        args.x = moved(args.x, row * args.stride * element);
    }
};

}  // namespace

void PickTokens::append(const Frame& frame) const {
    const ValueId to = writes[0];
    ops::append_pick_rows(frame.phases, table, frame.inputs.token_ids, frame.rows(to),
                     frame.values[to].row_bytes, frame.at(to));
}

void PickPackedTokens::append(const Frame& frame) const {
    const int64_t* ids = frame.inputs.token_ids;
    char* out = frame.at<char>(writes[0]);
    const int64_t count = frame.rows(writes[0]);
    const linear::LinearKernel* from = &table;
    frame.phases.add(1, [=](int64_t) { from->gather(ids, count, out); });
}

void HiddenIn::append(const Frame& frame) const {
    const ValueId to = writes[0];
    const int64_t row_bytes = frame.values[to].row_bytes;
    ops::append_copy_rows(frame.phases, frame.inputs.given, frame.rows(to), row_bytes,
                          frame.at<char>(to), row_bytes);
}

void AddPositions::append(const Frame& frame) const {
    const ValueId x = reads[0];
    ops::append_add_rows(frame.phases,
                    {.x = frame.at(x),
                     .table = table,
                     .ids = frame.inputs.batch.positions(),
                     .size = frame.values[x].columns},
                    frame.dtype, frame.rows(x));
}

void Add::append(const Frame& frame) const {
    const ValueId x = reads[0];
    ops::append_add_rows(frame.phases,
                         {.x = frame.at(x),
                          .table = frame.at(reads[1]),
                          .ids = nullptr,
                          .size = frame.values[x].columns},
                         frame.dtype, frame.rows(x));
}

void Scale::append(const Frame& frame) const {
    const ValueId x = reads[0];
    const bool wide = frame.values[x].row_bytes == 4 * frame.values[x].columns;
    const ops::DType dtype = wide ? ops::DType::float32 : frame.dtype;
    ops::append_scale(frame.phases, frame.at(x), factor, dtype, elements(frame, x));
}

void SoftCap::append(const Frame& frame) const {
    ops::append_soft_cap(frame.phases, frame.at<float>(reads[0]), cap, elements(frame, reads[0]));
}

void PickLogitRows::append(const Frame& frame) const {
    ops::append_pick_rows(frame.phases, frame.at(reads[0]), frame.inputs.batch.logit_rows(),
                     frame.rows(writes[0]), frame.values[writes[0]].row_bytes,
                     frame.at(writes[0]));
}

void Concat::append(const Frame& frame) const {
    const Value& out = frame.values[writes[0]];
    char* to = frame.at<char>(writes[0]);
    for (const ValueId from : reads) {
        const int64_t row_bytes = frame.values[from].row_bytes;
        ops::append_copy_rows(frame.phases, frame.at(from), frame.rows(from), row_bytes, to,
                              out.row_bytes);
        to += row_bytes;
    }
}

void ScatterColumns::append(const Frame& frame) const {
    const ValueId x = reads[0], out = writes[0];
    ops::append_spread(frame.phases, frame.at<float>(x), frame.rows(x), frame.values[x].columns,
                       columns, frame.values[out].columns, frame.at<float>(out));
}

void Tap::append(const Frame& frame) const {
    const Value& x = frame.values[reads[0]];
    char* const to = frame.states + column * (x.row_bytes / x.columns);
    ops::append_copy_rows(frame.phases, frame.at(reads[0]), frame.rows(reads[0]), x.row_bytes, to,
                          frame.state_bytes);
}

RmsNorm::RmsNorm(ValueId x_, ValueId residual_, ValueId out_, const void* weight_, float eps_,
                 float offset_)
    : Op(Kind::rowwise, present(x_, residual_), {out_}), x(x_), residual(residual_), out(out_),
      weight(weight_), eps(eps_), offset(offset_) {}

ops::RmsNormArgs RmsNorm::args(const Frame& frame) const {
    const int64_t size = frame.values[x].columns;
    return {.x = frame.at(x),
            .x_stride = size,
            .residual = residual == kNoValue ? nullptr : frame.at(residual),
            .weight = weight,
            .out = frame.at(out),
            .out_stride = size,
            .size = size,
            .eps = eps,
            .weight_offset = offset};
}

void ColumnsNorm::append(const Frame& frame) const {
    const Value& x = frame.values[reads[0]];
    char* const at = frame.at<char>(reads[0]) + first * (x.row_bytes / x.columns);
    append_rms_norm(frame.phases,
                    {.x = at,
                     .x_stride = x.columns,
                     .residual = nullptr,
                     .weight = weight,
                     .out = at,
                     .out_stride = x.columns,
                     .size = size,
                     .eps = eps,
                     .weight_offset = offset},
                    frame.dtype, frame.rows(reads[0]));
}

void RmsNorm::append(const Frame& frame) const {
    append_rms_norm(frame.phases, args(frame), frame.dtype, frame.rows(x));
}

linear::RowSource RmsNorm::row_source(const Frame& frame) const {
    return one_row(frame, args(frame), kernels(frame.dtype).rms_norm, MoveNorm());
}

LayerNorm::LayerNorm(ValueId x_, ValueId residual_, ValueId out_, const void* weight_,
                     const void* bias_, float eps_)
    : Op(Kind::rowwise, present(x_, residual_), {out_}), x(x_), residual(residual_), out(out_),
      weight(weight_), bias(bias_), eps(eps_) {}

ops::LayerNormArgs LayerNorm::args(const Frame& frame) const {
    const int64_t size = frame.values[x].columns;
    return {.x = frame.at(x),
            .x_stride = size,
            .residual = residual == kNoValue ? nullptr : frame.at(residual),
            .weight = weight,
            .bias = bias,
            .out = frame.at(out),
            .size = size,
            .eps = eps};
}

void LayerNorm::append(const Frame& frame) const {
    append_layer_norm(frame.phases, args(frame), frame.dtype, frame.rows(x));
}

linear::RowSource LayerNorm::row_source(const Frame& frame) const {
    return one_row(frame, args(frame), kernels(frame.dtype).layer_norm, MoveNorm());
}

ops::GatedArgs Gated::args(const Frame& frame) const {
    const int64_t size = frame.values[writes[0]].columns;
    return {.gate_up = frame.at(reads[0]),
            .stride = 2 * size,
            .out = frame.at(writes[0]),
            .size = size};
}

void Gated::append(const Frame& frame) const {
    append_gated(frame.phases, args(frame), frame.dtype, frame.rows(reads[0]), gelu);
}

linear::RowSource Gated::row_source(const Frame& frame) const {
    const ops::Kernels& table = kernels(frame.dtype);
    return one_row(frame, args(frame), gelu ? table.gelu_tanh_mul : table.silu_mul, MoveGated());
}

ops::ActivationArgs Activation::args(const Frame& frame) const {
    const int64_t size = frame.values[writes[0]].columns;
    return {.x = frame.at(reads[0]), .stride = size, .out = frame.at(writes[0]), .size = size};
}

void Activation::append(const Frame& frame) const {
    append_activation(frame.phases, args(frame), function, frame.dtype, frame.rows(reads[0]));
}

linear::RowSource Activation::row_source(const Frame& frame) const {
    const auto kernel = kernels(frame.dtype).activation[static_cast<int>(function)];
    return one_row(frame, args(frame), kernel, MoveActivation());
}

// The packed rows, and for the arg-max what is left of it between its phases.
std::size_t Linear::scratch_bytes(const Frame& frame) const {
    const int64_t count = frame.rows(writes[0]);
    return round_up(weight.packed_bytes(count)) + (float32 ? weight.argmax_bytes(count) : 0);
}

linear::RowSource Linear::rows(const Frame& frame) const {
    if (source) return source->row_source(frame);
    return linear::RowSource::plain(frame.at<char>(reads[0]), frame.values[reads[0]].row_bytes);
}

void Linear::append(const Frame& frame) const {
    const ValueId y = writes[0];
    weight.append(frame.phases, rows(frame), frame.rows(y), frame.scratch,
                  {frame.at<char>(y), frame.values[y].row_bytes, float32});
}

void Linear::append_argmax(const Frame& frame, const Outputs& outputs) const {
    const int64_t count = frame.rows(writes[0]);
    char* partial = frame.scratch + round_up(weight.packed_bytes(count));
    weight.append_argmax(frame.phases, rows(frame), count, frame.scratch, partial,
                         {outputs.logits, frame.values[writes[0]].row_bytes, outputs.kept},
                         {outputs.largest, outputs.columns});
}

void Linear::fuse(std::unique_ptr<Op> before) {
    reads = before->reads;
    source = std::move(before);
}

void Route::append(const Frame& frame) const {
    append_routing(frame.phases, routing, frame.at<float>(reads[0]), frame.rows(reads[0]),
                   frame.at<int32_t>(writes[0]), frame.at<float>(writes[1]));
}

void Experts::append(const Frame& frame) const {
    experts.append(frame.phases, frame.at<char>(reads[0]),
                   {.ids = frame.at<int32_t>(reads[1]),
                    .weights = frame.at<float>(reads[2]),
                    .rows = frame.rows(reads[0]),
                    .top_k = frame.values[reads[1]].columns},
                   frame.at<char>(writes[0]), frame.own_memory);
}

void SigmoidScale::append(const Frame& frame) const {
    mixture::append_sigmoid_scale(frame.phases, frame.at(reads[0]), frame.at<float>(reads[1]),
                                  frame.dtype, frame.rows(reads[0]),
                                  frame.values[reads[0]].columns);
}

void PerHead::append(const Frame& frame) const {
    const ValueId x = reads[0], y = writes[0];
    weight.append(frame.phases, {frame.at<char>(x), frame.values[x].row_bytes}, frame.rows(x),
                  {frame.at<char>(y), frame.values[y].row_bytes});
}

void LatentWrite::append(const Frame& frame) const {
    const Rotation& table = frame.rotations[rotation];
    append_latent_write(frame.phases, frame.inputs.batch, frame.inputs.pages, layer,
                        {.queries = frame.at(reads[0]),
                         .row_stride = frame.values[reads[0]].columns,
                         .q_heads = q_heads,
                         .latents = frame.at(reads[1]),
                         .latent_stride = frame.values[reads[1]].columns,
                         .norm = norm,
                         .eps = eps,
                         .weight_offset = offset,
                         .cos = table.cos,
                         .sin = table.sin,
                         .max_positions = table.max_positions,
                         .half = table.half,
                         .interleaved = table.interleaved});
}

void RotaryKvWrite::append(const Frame& frame) const {
    const Rotation none{};
    const Rotation& table = rotation < 0 ? none : frame.rotations[rotation];
    append_rotary_kv_write(frame.phases, frame.inputs.batch, frame.inputs.pages, layer,
                           {.qkv = frame.at(reads[0]),
                            .row_stride = frame.values[reads[0]].columns,
                            .q_heads = q_heads,
                            .cos = table.cos,
                            .sin = table.sin,
                            .max_positions = table.max_positions,
                            .half = table.half,
                            .interleaved = table.interleaved,
                            .query_scale = table.query_scale,
                            .q_norm = q_norm,
                            .k_norm = k_norm,
                            .eps = eps,
                            .weight_offset = offset});
}

ops::AttentionCall Attention::call(const Frame& frame) const {
    return {.qkv = frame.at(reads[0]),
            .row_stride = frame.values[reads[0]].columns,
            .q_heads = q_heads,
            .out = frame.at(writes[0]),
            .scale = scale,
            .soft_cap = soft_cap,
            .window = window,
            .logit_rows_only = frame.values[writes[0]].logit_rows_only,
            .sinks = sinks,
            .log_sum_exp = nullptr};
}

std::size_t Attention::scratch_bytes(const Frame& frame) const {
    return static_cast<std::size_t>(
               ops::partials_of(frame.inputs.batch, frame.inputs.pages, layer, call(frame))) *
           sizeof(float);
}

void Attention::append(const Frame& frame) const {
    append_paged_attention(frame.phases, frame.inputs.batch, frame.inputs.pages, layer, call(frame),
                           reinterpret_cast<float*>(frame.scratch));
}

}  // namespace aioserve::program

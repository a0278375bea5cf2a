#include "program/program.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "ops/elementwise.h"
#include "program/layers.h"

namespace aioserve::program {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{1} << 21;

std::size_t round_up(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

[[noreturn]] void refuse(const std::string& problem) {
    throw std::invalid_argument("program: " + problem);
}

int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

// -- recording

ValueId Program::add_value(bool logit_rows_only, int64_t columns, bool float32) {
    if (logits_ != kNoValue) refuse("is finished");
    const int64_t element = float32 || dtype_ == ops::DType::float32 ? 4 : 2;
    values_.push_back({logit_rows_only, columns, columns * element});
    return static_cast<ValueId>(values_.size() - 1);
}

const Value& Program::check(ValueId id) const {
    if (id < 0 || id >= static_cast<ValueId>(values_.size()))
        refuse("has no value " + std::to_string(id));
    return values_[id];
}

ValueId Program::embedding(const void* table, int64_t vocab, int64_t columns) {
    vocab_ = vocab;
    const ValueId to = add_value(false, columns);
    ops_.push_back(std::make_unique<PickTokens>(to, table));
    return to;
}

ValueId Program::packed_embedding(const linear::LinearKernel& table, int64_t vocab,
                                  int64_t columns) {
    vocab_ = vocab;
    const ValueId to = add_value(false, columns);
    ops_.push_back(std::make_unique<PickPackedTokens>(to, table));
    return to;
}

ValueId Program::hidden_in(int64_t columns) {
    if (given_columns_) refuse("is given rows once");
    if (columns < 1) refuse("is given rows of at least one column");
    given_columns_ = columns;
    const ValueId to = add_value(false, columns);
    ops_.push_back(std::make_unique<HiddenIn>(to));
    return to;
}

void Program::add_positions(ValueId x, const void* table, int64_t positions) {
    check(x);
    positions_ = positions;
    ops_.push_back(std::make_unique<AddPositions>(x, table));
}

void Program::add(ValueId x, ValueId y) {
    if (check(x).columns != check(y).columns || check(x).logit_rows_only != check(y).logit_rows_only)
        refuse("adds a value of " + std::to_string(check(y).columns) + " columns to one of " +
               std::to_string(check(x).columns) + ", of the same rows");
    ops_.push_back(std::make_unique<Add>(x, y));
}

void Program::scale(ValueId x, float factor) {
    check(x);
    ops_.push_back(std::make_unique<Scale>(x, factor));
}

ValueId Program::linear(ValueId x, const linear::LinearKernel& weight, int64_t in_features,
                        int64_t out_features, bool float32) {
    if (check(x).columns != in_features)
        refuse("a linear layer of " + std::to_string(in_features) + " inputs reads a value of " +
               std::to_string(check(x).columns) + " columns");
    const ValueId y = add_value(check(x).logit_rows_only, out_features, float32);
    ops_.push_back(std::make_unique<Linear>(x, y, weight, float32));
    return y;
}

ValueId Program::rms_norm(ValueId x, ValueId residual, const void* weight, float eps,
                          float weight_offset) {
    const ValueId out = add_value(check(x).logit_rows_only, check(x).columns);
    ops_.push_back(std::make_unique<RmsNorm>(x, residual, out, weight, eps, weight_offset));
    return out;
}

void Program::norm_columns(ValueId x, int64_t first, int64_t size, const void* weight, float eps,
                           float weight_offset) {
    if (first < 0 || size < 1 || first + size > check(x).columns)
        refuse("has no columns " + std::to_string(first) + " to " + std::to_string(first + size) +
               " in a value of " + std::to_string(check(x).columns));
    ops_.push_back(std::make_unique<ColumnsNorm>(x, first, size, weight, eps, weight_offset));
}

ValueId Program::layer_norm(ValueId x, ValueId residual, const void* weight, const void* bias,
                            float eps) {
    const ValueId out = add_value(check(x).logit_rows_only, check(x).columns);
    ops_.push_back(std::make_unique<LayerNorm>(x, residual, out, weight, bias, eps));
    return out;
}

int Program::add_rotation(int64_t half, bool interleaved) {
    rotations_.push_back({.half = half, .interleaved = interleaved});
    return static_cast<int>(rotations_.size() - 1);
}

void Program::set_rotation(int index, const float* cos, const float* sin, const float* query_scale,
                           int64_t max_positions) {
    Rotation& rotation = rotations_.at(index);
    rotation.cos = cos;
    rotation.sin = sin;
    rotation.query_scale = query_scale;
    rotation.max_positions = max_positions;
}

int64_t Program::check_qkv(ValueId qkv, int64_t layer) {
    const int64_t columns = check(qkv).columns, others = rank_ ? 0 : 2 * kv_heads_;
    const int64_t q_heads = columns / head_dim_ - others;
    if (columns % head_dim_ || q_heads < 1 || q_heads % kv_heads_)
        refuse("queries, keys and values must have (Hq + " + std::to_string(others) + ") * " +
               std::to_string(head_dim_) + " columns, got " + std::to_string(columns));
    if (layer < 0) refuse("layer must be at least 0, got " + std::to_string(layer));
    layers_ = std::max(layers_, layer + 1);
    return q_heads;
}

void Program::rotary_kv_write(ValueId qkv, int64_t layer, int rotation, const HeadNorms& norms) {
    if (rank_) refuse("has latent pages");
    if (rotation >= static_cast<int>(rotations_.size()))
        refuse("has no rotation " + std::to_string(rotation));
    ops_.push_back(std::make_unique<RotaryKvWrite>(qkv, layer, check_qkv(qkv, layer), rotation,
                                                   norms.query, norms.key, norms.eps,
                                                   norms.weight_offset));
}

void Program::latent_write(ValueId queries, ValueId latents, int64_t layer, int rotation,
                           const LatentNorm& norm) {
    if (!rank_) refuse("has no latent pages");
    if (rotation < 0 || rotation >= static_cast<int>(rotations_.size()))
        refuse("has no rotation " + std::to_string(rotation));
    if (check(latents).columns != head_dim_)
        refuse("latents must have " + std::to_string(head_dim_) + " columns, got " +
               std::to_string(check(latents).columns));
    ops_.push_back(std::make_unique<LatentWrite>(queries, latents, layer, check_qkv(queries, layer),
                                                 rotation, norm.weight, norm.eps,
                                                 norm.weight_offset));
}

ValueId Program::attention(ValueId qkv, int64_t layer, float scale, float soft_cap, int64_t window,
                           const float* sinks, bool logit_rows_only) {
    const int64_t q_heads = check_qkv(qkv, layer);
    const ValueId out = add_value(logit_rows_only, q_heads * (rank_ ? rank_ : head_dim_));
    ops_.push_back(
        std::make_unique<Attention>(qkv, out, layer, q_heads, scale, soft_cap, window, sinks));
    return out;
}

ValueId Program::per_head(ValueId x, const linear::PerHeadKernel& weight) {
    if (check(x).columns != weight.in_columns())
        refuse("a product of heads of " + std::to_string(weight.in_columns()) +
               " columns reads a value of " + std::to_string(check(x).columns));
    const ValueId y = add_value(check(x).logit_rows_only, weight.out_columns());
    ops_.push_back(std::make_unique<PerHead>(x, y, weight));
    return y;
}

ValueId Program::gated(ValueId gate_up, bool gelu) {
    const ValueId out = add_value(check(gate_up).logit_rows_only, check(gate_up).columns / 2);
    ops_.push_back(std::make_unique<Gated>(gate_up, out, gelu));
    return out;
}

ValueId Program::activation(ValueId x, ops::Activation kind) {
    const ValueId out = add_value(check(x).logit_rows_only, check(x).columns);
    ops_.push_back(std::make_unique<Activation>(x, out, kind));
    return out;
}

ValueId Program::experts(ValueId x, ValueId scores, const mixture::Experts& experts,
                         const mixture::Routing& routing) {
    routing.check();
    const Value& rows = check(x);
    const Value& from = check(scores);
    if (rows.columns != experts.hidden() || experts.bfloat16() != (dtype_ == ops::DType::bfloat16) ||
        from.columns != experts.count() || routing.experts != experts.count() ||
        from.row_bytes != 4 * from.columns || from.logit_rows_only != rows.logit_rows_only)
        refuse("experts must read a value of " + std::to_string(experts.hidden()) +
               " columns in its dtype, and float32 scores of as many rows for each of " +
               std::to_string(experts.count()));
    const bool logit_rows_only = rows.logit_rows_only;
    const ValueId ids = add_value(logit_rows_only, routing.top_k, true);
    const ValueId weights = add_value(logit_rows_only, routing.top_k, true);
    const ValueId out = add_value(logit_rows_only, experts.hidden());
    ops_.push_back(std::make_unique<Route>(scores, ids, weights, routing));
    ops_.push_back(std::make_unique<Experts>(x, ids, weights, out, experts));
    return out;
}

void Program::sigmoid_scale(ValueId x, ValueId gate) {
    if (check(gate).columns != 1 || check(gate).row_bytes != 4 ||
        check(gate).logit_rows_only != check(x).logit_rows_only)
        refuse("scales the rows of a value by a float32 column of as many rows");
    ops_.push_back(std::make_unique<SigmoidScale>(x, gate));
}

ValueId Program::logit_rows(ValueId x) {
    const ValueId out = add_value(true, check(x).columns);
    ops_.push_back(std::make_unique<PickLogitRows>(x, out));
    return out;
}

void Program::soft_cap(ValueId x, float cap) {
    check(x);
    ops_.push_back(std::make_unique<SoftCap>(x, cap));
}

bool Program::is_own_dtype(const Value& value) const {
    return value.row_bytes == (dtype_ == ops::DType::float32 ? 4 : 2) * value.columns;
}

ValueId Program::concat(ValueId x, ValueId y) {
    const Value &left = check(x), &right = check(y);
    if (left.logit_rows_only != right.logit_rows_only || !is_own_dtype(left) || !is_own_dtype(right))
        refuse("has values of its dtype and of the same rows side by side");
    const ValueId out = add_value(left.logit_rows_only, left.columns + right.columns);
    ops_.push_back(std::make_unique<Concat>(x, y, out));
    return out;
}

ValueId Program::scatter_columns(ValueId x, const int64_t* columns, int64_t size) {
    const Value& value = check(x);
    if (value.row_bytes != 4 * value.columns) refuse("spreads float32 columns alone");
    const ValueId out = add_value(value.logit_rows_only, size, true);
    ops_.push_back(std::make_unique<ScatterColumns>(x, out, columns));
    return out;
}

void Program::tap(ValueId x, int64_t column) {
    const Value& value = check(x);
    if (!is_own_dtype(value) || column < 0)
        refuse("keeps values of its dtype, from column 0 on");
    if (state_columns_ && value.logit_rows_only != keeps_logit_rows_)
        refuse("keeps values with a row for each token, or values of the logit rows alone");
    keeps_logit_rows_ = value.logit_rows_only;
    state_columns_ = std::max(state_columns_, column + value.columns);
    ops_.push_back(std::make_unique<Tap>(x, column));
}

void Program::finish(ValueId logits) {
    const Value& value = check(logits);
    if (!value.logit_rows_only || value.row_bytes != 4 * value.columns)
        refuse("logits must be float32, of the logit rows alone");
    logits_ = logits;
    fuse();
    place();
    addresses_.assign(values_.size(), nullptr);
}

// An op whose one result is read by the linear layer that follows and by nothing else.
void Program::fuse() {
    std::vector<int> readers(values_.size());
    for (const auto& op : ops_)
        for (const ValueId id : op->reads) ++readers[id];
    ++readers[logits_];
    std::vector<std::unique_ptr<Op>> fused;
    for (auto& op : ops_) {
        auto* layer = dynamic_cast<Linear*>(op.get());
        if (layer && !fused.empty() && fused.back()->is_row_source()) {
            const ValueId between = fused.back()->writes[0];
            if (layer->reads[0] == between && readers[between] == 1) {
                layer->fuse(std::move(fused.back()));
                fused.pop_back();
            }
        }
        fused.push_back(std::move(op));
    }
    ops_ = std::move(fused);
}

// Values get places in the order in which they are written, and give them back after the last op that
// names them: the free place whose size is nearest, or a new one.
void Program::place() {
    std::vector<std::size_t> last(values_.size(), 0);
    for (std::size_t i = 0; i < ops_.size(); ++i) {
        for (const ValueId id : ops_[i]->reads) last[id] = i;
        for (const ValueId id : ops_[i]->writes) last[id] = i;
    }
    last[logits_] = ops_.size();
    place_of_.assign(values_.size(), -1);
    std::vector<int> free;
    const auto take = [&](const Value& value) {
        const auto bytes_of = [&](const Place& place) {
            return value.logit_rows_only ? place.bytes_per_logit_row : place.bytes_per_token;
        };
        const auto growth = [&](int place) {
            return std::abs(bytes_of(places_[place]) - value.row_bytes);
        };
        int taken = static_cast<int>(places_.size());
        if (free.empty()) {
            places_.emplace_back();
        } else {
            const auto best = std::min_element(free.begin(), free.end(), [&](int a, int b) {
                return growth(a) < growth(b);
            });
            taken = *best;
            free.erase(best);
        }
        Place& place = places_[taken];
        int64_t& bytes = value.logit_rows_only ? place.bytes_per_logit_row : place.bytes_per_token;
        bytes = std::max(bytes, value.row_bytes);
        return taken;
    };
    for (std::size_t i = 0; i < ops_.size(); ++i) {
        for (const ValueId id : ops_[i]->writes) place_of_[id] = take(values_[id]);
        for (ValueId id = 0; id < static_cast<ValueId>(values_.size()); ++id)
            if (place_of_[id] >= 0 && last[id] == i) free.push_back(place_of_[id]);
    }
}

// -- running

void Program::FreeMemory::operator()(char* memory) const { munmap(memory, size); }

void Program::check_inputs(const Inputs& inputs) const {
    if (logits_ == kNoValue) refuse("is not finished");
    const ops::KVPages& pages = inputs.pages;
    if (pages.dtype != dtype_ || pages.heads != kv_heads_ || pages.head_dim != head_dim_ ||
        pages.rank != rank_ || pages.layers() < layers_)
        refuse("pages must have its dtype, " + std::to_string(kv_heads_) + " heads of " +
               std::to_string(head_dim_) + " and at least " + std::to_string(layers_) + " layers");
    inputs.batch.check_pages(inputs.pages);
    const int64_t tokens = inputs.batch.num_tokens();
    for (int64_t i = 0; i < tokens; ++i) {
        const int64_t id = inputs.token_ids[i];
        if (id < 0 || id >= vocab_)
            throw std::out_of_range("token_ids must be from 0 to " + std::to_string(vocab_ - 1) +
                                    ", got " + std::to_string(id));
    }
    if ((inputs.given == nullptr) != (given_columns_ == 0))
        refuse("is given rows of " + std::to_string(given_columns_) + " columns");
    if (positions_ && inputs.batch.end_position() > positions_)
        refuse("positions go to " + std::to_string(inputs.batch.end_position() - 1) + ", but there " +
               "are embeddings of " + std::to_string(positions_));
}

void Program::check_states(const Inputs& inputs, const Outputs& outputs) const {
    const int64_t rows = keeps_logit_rows_ ? inputs.batch.num_logit_rows() : inputs.batch.num_tokens();
    if (rows && (outputs.states == nullptr) != (state_columns_ == 0))
        refuse("keeps " + std::to_string(state_columns_) + " columns of each " +
               (keeps_logit_rows_ ? "logit row" : "token"));
}

// Addresses of all values, and the scratch after them.
void Program::lay_out(const Inputs& inputs, float* logits) {
    const Frame sizes{inputs,  values_, addresses_, rotations_, dtype_,
                      nullptr, nullptr, 0,          phases_,    own_memory_};
    std::size_t scratch = 0;
    for (const auto& op : ops_) scratch = std::max(scratch, op->scratch_bytes(sizes));
    std::vector<std::size_t> offsets;
    std::size_t size = round_up(scratch, kAlignment);
    for (const Place& place : places_) {
        offsets.push_back(size);
        const int64_t bytes = std::max(place.bytes_per_token * inputs.batch.num_tokens(),
                                       place.bytes_per_logit_row * inputs.batch.num_logit_rows());
        size += round_up(static_cast<std::size_t>(bytes), kAlignment);
    }
    if (size > arena_size_) {
        arena_.reset();
        arena_size_ = 0;
        const std::size_t wanted = round_up(size, kHugePage);
        void* memory = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        madvise(memory, wanted, MADV_HUGEPAGE);  // a wish: without it only speed is lost
#endif
        arena_ = {static_cast<char*>(memory), FreeMemory{wanted}};
        arena_size_ = wanted;
    }
    for (std::size_t id = 0; id < values_.size(); ++id)
        if (place_of_[id] >= 0) addresses_[id] = arena_.get() + offsets[place_of_[id]];
    if (logits) addresses_[logits_] = reinterpret_cast<char*>(logits);
}

void Program::run(const Inputs& inputs, const Outputs& outputs) {
    check_inputs(inputs);
    check_states(inputs, outputs);
    lay_out(inputs, outputs.logits);
    phases_.clear();
    kinds_.clear();
    const int64_t element = dtype_ == ops::DType::float32 ? 4 : 2;
    append_ops({inputs, values_, addresses_, rotations_, dtype_, arena_.get(), outputs.states,
                element * state_columns_, phases_, own_memory_},
               outputs);
    run_phases();
}

void Program::append_ops(const Frame& frame, const Outputs& outputs) {
    const auto counts_as = [&](Kind kind) {
        kinds_.resize(static_cast<std::size_t>(phases_.count()), kind);
    };
    const auto* head = dynamic_cast<const Linear*>(ops_.back().get());
    const bool fused = outputs.largest && head && head->writes[0] == logits_;
    for (const auto& op : ops_) {
        if (op->reads_results()) run_phases();
        if (fused && op == ops_.back()) {
            head->append_argmax(frame, outputs);
        } else {
            op->append(frame);
        }
        counts_as(op->kind);
    }
    if (!outputs.largest || fused) return;
    ops::append_largest(phases_, frame.at<float>(logits_), frame.rows(logits_),
                   values_[logits_].columns, outputs.largest, outputs.columns);
    counts_as(Kind::rowwise);
}

void Program::run_phases() {
    if (measured_) {
        ended_.resize(kinds_.size());
        int64_t began = now_ns();
        phases_.run(ended_.data());
        for (std::size_t i = 0; i < kinds_.size(); ++i) {
            nanoseconds_[static_cast<int>(kinds_[i])] += ended_[i] - began;
            began = ended_[i];
        }
    } else {
        phases_.run();
    }
    phases_.clear();
    kinds_.clear();
}

void Program::measure(bool on) {
    measured_ = on;
    nanoseconds_.fill(0);
}

}  // namespace aioserve::program

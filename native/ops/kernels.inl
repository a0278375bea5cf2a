// Every op, for the `Vec` in scope. Each `kernels_*.cpp` includes this with compiler flags of its own;
// internal linkage keeps the copies apart. Nothing here may use an inline function of the standard
// library: the linker keeps one copy of such a function, and it may be this one, compiled for an
// instruction set that the machine lacks.

#include "common/scratch.h"
#include "ops/types.h"
#include "simd/common.inl"

namespace aioserve::ops {
namespace {

#include "ops/rowwise.inl"
#include "ops/latent.inl"
#include "ops/sampling.inl"
#include "ops/attention_product.inl"
#include "ops/attention_block.inl"
#include "ops/attention_weights.inl"
#include "ops/attention_tiles.inl"
#include "ops/attention.inl"

template <class T>
constexpr Kernels kKernels = {
    .rms_norm = rms_norm<T>,
    .layer_norm = layer_norm<T>,
    .rotary_kv_write = rotary_kv_write<T>,
    .latent_write = latent_write<T>,
    .silu_mul = gated<T, false>,
    .gelu_tanh_mul = gated<T, true>,
    .clamped_swiglu = clamped_swiglu<T>,
    .activation = {activation<T, Activation::gelu_tanh>, activation<T, Activation::gelu>,
                   activation<T, Activation::relu_squared>},
    .add_rows = add_rows<T>,
    .scale = scale<T>,
    .soft_cap = soft_cap,
    .largest = largest,
    .leave_out = leave_out,
    .sampling = kSampling,
    .attention = attention<T>,
    .attention_split = attention_split<T>,
    .attention_merge = attention_merge<T>,
    .merge_attention = merge_attention<T>,
};

constexpr Table kTable = {kKernels<float>, kKernels<bf16>};

}  // namespace
}  // namespace aioserve::ops

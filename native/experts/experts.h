// A mixture of experts: each row's chosen gated MLPs, weighted and summed.
//
// Pairs of a row and an expert are sorted by expert, so that each expert that has rows is one product
// of all of them, and its weights are read once. The products of all experts run side by side.

#pragma once

#include <cstdint>
#include <vector>

#include "common/phases.h"
#include "linear/kernel.h"
#include "ops/types.h"

namespace aioserve::mixture {

struct Expert {
    const linear::LinearKernel* up;    // [2 * inner, hidden]: the gate, then up
    const linear::LinearKernel* down;  // [hidden, inner]
};

enum class GateKind : int { silu, gelu_tanh, clamped_swiglu };

struct Gate {
    GateKind kind;
    float gain = 0, limit = 0;  // of `clamped_swiglu` alone
};

// Rows as `append_routing` leaves them.
struct Routes {
    const int32_t* ids;    // [rows, top_k]: -1 for none, whose part of the sum is 0
    const float* weights;  // [rows, top_k]
    int64_t rows;
    int64_t top_k;
};

class Experts {
  public:
    // Throws std::invalid_argument unless there are some, of the same sizes and dtype.
    Experts(std::vector<Expert> experts, Gate gate);

    // y [rows, hidden] = sums of weight * expert(x), in the order of a row's ids, rounded once; x
    // and y contiguous in the experts' dtype. Reads `routes` now; x when the phases run. `memory`
    // must stay until then. A row's result depends on that row alone, to the bit.
    // Throws std::invalid_argument for an id that is no expert.
    void append(Phases& phases, const char* x, const Routes& routes, char* y,
                linear::AlignedMemory& memory) const;

    int64_t count() const { return static_cast<int64_t>(experts_.size()); }
    int64_t hidden() const { return experts_.front().up->in_features(); }
    bool bfloat16() const { return experts_.front().up->bfloat16(); }

  private:
    int64_t inner() const { return experts_.front().down->in_features(); }

    std::vector<Expert> experts_;
    Gate gate_;
};

// x [rows, size] *= sigmoid(gate [rows]).
void append_sigmoid_scale(Phases& phases, void* x, const float* gate, ops::DType dtype, int64_t rows,
                          int64_t size);

}  // namespace aioserve::mixture

// A kernel whose inputs come in another order than the layer's: of weights whose groups of inputs don't
// lie side by side, and were sorted.

#pragma once

#include <vector>

#include "linear/kernel.h"

namespace aioserve::linear {

class PermutedKernel : public LinearKernel {
  public:
    // Input i of `kernel`, which must outlive this, is input order[i] of the layer. Throws
    // std::invalid_argument unless `order` names each input once.
    PermutedKernel(const LinearKernel& kernel, std::vector<int32_t> order);

    void append(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                const Rows& y) const override;
    std::size_t packed_bytes(int64_t rows) const override { return kernel_.packed_bytes(rows); }
    void append_argmax(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                       char* partial, const KeptRows& kept, const Largest& largest) const override;
    std::size_t argmax_bytes(int64_t rows) const override { return kernel_.argmax_bytes(rows); }
    std::size_t num_bytes() const override { return kernel_.num_bytes(); }
    void row(int64_t id, char* out) const override;

  private:
    RowSource in_order(Phases& phases, const RowSource& x) const;

    const LinearKernel& kernel_;
    std::vector<int32_t> order_;
};

}  // namespace aioserve::linear

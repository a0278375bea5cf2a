// Several kernels as one layer, whose outputs are those of the parts in order: a fused layer whose parts
// are stored in different formats.

#pragma once

#include <vector>

#include "linear/kernel.h"

namespace aioserve::linear {

class JoinedKernel : public LinearKernel {
  public:
    // The parts must outlive this. Throws std::invalid_argument unless there are some, with the same
    // in_features and dtype.
    explicit JoinedKernel(std::vector<const LinearKernel*> parts);

    // Rows that are made, and not read from where they lie, are made once, before the parts read them.
    void append(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                const Rows& y) const override;
    std::size_t packed_bytes(int64_t rows) const override;
    void append_argmax(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                       char* partial, const KeptRows& kept, const Largest& largest) const override;
    std::size_t argmax_bytes(int64_t rows) const override;
    std::size_t num_bytes() const override;
    const std::vector<const LinearKernel*>& parts() const { return parts_; }
    void row(int64_t id, char* out) const override;

  private:
    struct Memory {
        std::size_t made;  // where rows lie that are made
        std::size_t row_bytes;
    };
    Memory memory(int64_t rows) const;
    std::size_t most_argmax_bytes(int64_t rows) const;
    RowSource append_rows(Phases& phases, const RowSource& x, int64_t rows, char* packed) const;
    // `fn(part, its first output)`.
    template <class Fn>
    void for_each_part(const Fn& fn) const;

    std::vector<const LinearKernel*> parts_;
};

}  // namespace aioserve::linear

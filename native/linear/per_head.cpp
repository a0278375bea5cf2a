#include "linear/per_head.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/thread_pool.h"

namespace aioserve::linear {
namespace {

// One thread's estimate, to see whether waking another pays.
constexpr double kBytesPerNanosecond = 40;
constexpr double kMultipliesPerNanosecond = 60;
// Rows of a task: enough for a weight to be read for many at once.
constexpr int64_t kTaskRows = 64;

}  // namespace

PerHeadKernel::PerHeadKernel(std::vector<const LinearKernel*> heads, int64_t passed)
    : heads_(std::move(heads)), passed_(passed) {
    if (heads_.empty()) throw std::invalid_argument("heads must be at least one");
    if (passed < 0) throw std::invalid_argument("passed must be at least 0");
    const LinearKernel& first = *heads_[0];
    for (const LinearKernel* head : heads_)
        if (head->in_features() != first.in_features() ||
            head->out_features() != first.out_features() || head->bfloat16() != first.bfloat16())
            throw std::invalid_argument("heads must have the same sizes and dtype");
}

std::size_t PerHeadKernel::num_bytes() const {
    std::size_t bytes = 0;
    for (const LinearKernel* head : heads_) bytes += head->num_bytes();
    return bytes;
}

// A task is some rows of one head, by one thread: threads needn't meet between heads.
void PerHeadKernel::append(Phases& phases, const HeadRows& x, int64_t rows,
                           const HeadRows& y) const {
    const int64_t features = heads_[0]->in_features() * heads_[0]->out_features();
    const double nanoseconds =
        std::max(static_cast<double>(num_bytes()) / kBytesPerNanosecond,
                 static_cast<double>(count() * features * rows) / kMultipliesPerNanosecond);
    const bool alone = num_threads() == 1 || nanoseconds < kParallelThreshold;
    const int64_t wanted = (2 * num_threads() + count() - 1) / count();
    const int64_t slices =
        alone ? 1 : std::clamp<int64_t>(rows / kTaskRows, 1, std::max<int64_t>(1, wanted));
    const auto run = [this, x, rows, y, slices](int64_t task) {
        const int64_t slice = task % slices;
        multiply(task / slices, x, rows * slice / slices, rows * (slice + 1) / slices, y);
    };
    if (!alone) {
        phases.add(count() * slices, run);
        return;
    }
    phases.add(1, [run, tasks = count()](int64_t) {
        for (int64_t task = 0; task < tasks; ++task) run(task);
    });
}

void PerHeadKernel::multiply(int64_t head, const HeadRows& x, int64_t begin, int64_t end,
                             const HeadRows& y) const {
    if (begin == end) return;
    thread_local Phases phases;
    thread_local AlignedMemory packed;
    const LinearKernel& kernel = *heads_[head];
    const int64_t element = kernel.element_bytes();
    const int64_t in_bytes = kernel.in_features() * element;
    const int64_t out_bytes = kernel.out_features() * element;
    const int64_t passed_bytes = passed_ * element;
    const char* from = x.data + begin * x.row_bytes + head * (in_bytes + passed_bytes);
    char* to = y.data + begin * y.row_bytes + head * (out_bytes + passed_bytes);
    phases.clear();
    kernel.append(phases, RowSource::plain(from, x.row_bytes), end - begin,
                  packed.at_least(kernel.packed_bytes(end - begin)),
                  {to, y.row_bytes, !kernel.bfloat16()});
    phases.run_here();
    if (passed_ == 0) return;
    for (int64_t row = 0; row < end - begin; ++row)
        std::memcpy(to + row * y.row_bytes + out_bytes, from + row * x.row_bytes + in_bytes,
                    static_cast<std::size_t>(passed_bytes));
}

}  // namespace aioserve::linear

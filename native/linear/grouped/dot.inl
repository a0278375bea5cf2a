// Steps multiplied by `dot_bytes` in scope: four products and their sum in one instruction.

#include "linear/grouped/bytes.inl"

namespace aioserve::linear::grouped {
namespace {

struct Dot : Bytes {
    template <int ROWS, int VECTORS>
    struct Partial {
        Ints (&sums)[ROWS][VECTORS];
        explicit Partial(Ints (&sums_)[ROWS][VECTORS]) : sums(sums_) {}
        void add(int row, int v, Ints w, const char* x) {
            sums[row][v] = dot_bytes(sums[row][v], w, Ints::repeat(x));
        }
        void finish() {}
    };
};

}  // namespace
}  // namespace aioserve::linear::grouped

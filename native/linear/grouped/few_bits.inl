// Steps of 4 or 5 bits multiplied as bytes whose sums of two products are int16: 31 * 127 * 2, and four
// of them in a unit, stay below 2^15. (Of 6 bits they wouldn't.)

#include "linear/grouped/bytes.inl"

namespace aioserve::linear::grouped {
namespace {

struct FewBits : Bytes {
    template <int ROWS, int VECTORS>
    struct Partial {
        Ints (&sums)[ROWS][VECTORS];
        Ints halves[ROWS][VECTORS];
        explicit Partial(Ints (&sums_)[ROWS][VECTORS]) : sums(sums_) {
            for (auto& row : halves)
                for (Ints& sum : row) sum = Ints::zero();
        }
        void add(int row, int v, Ints w, const char* x) {
            halves[row][v] = add_halves(halves[row][v], multiply_bytes(w, Ints::repeat(x)));
            settle(halves[row][v]);
        }
        void finish() {
            alignas(4) static constexpr int16_t kOnes[2] = {1, 1};
            const Ints ones = Ints::repeat(kOnes);
            for (int row = 0; row < ROWS; ++row)
                for (int v = 0; v < VECTORS; ++v)
                    sums[row][v] = sums[row][v] + multiply_pairs(halves[row][v], ones);
        }
    };
};

}  // namespace
}  // namespace aioserve::linear::grouped

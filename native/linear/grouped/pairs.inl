// Steps multiplied as pairs of int16, which no sum of two products leaves: for 8 bits without `dot_bytes`.

#include "linear/grouped/tile.h"

namespace aioserve::linear::grouped {
namespace {

struct Pairs {
    static constexpr int kStepBytes = 8;
    struct Weights {
        Ints first, second;
    };
    static Weights weights(Ints steps) { return {steps.first_bytes(), steps.second_bytes()}; }

    template <int ROWS, int VECTORS>
    struct Partial {
        Ints (&sums)[ROWS][VECTORS];
        explicit Partial(Ints (&sums_)[ROWS][VECTORS]) : sums(sums_) {}
        void add(int row, int v, const Weights& w, const char* x) {
            const Ints first = multiply_pairs(w.first, Ints::repeat(x));
            const Ints second = multiply_pairs(w.second, Ints::repeat(x + 4));
            sums[row][v] = sums[row][v] + (first + second);
            settle(sums[row][v]);
        }
        void finish() {}
    };

    template <int COUNT>
    static void place(const int8_t* integers, char* chunks, int index, int rows) {
        char* to = chunks + index * kRowChunkBytes;
        for (int i = 0; i < COUNT; i += kRowChunkBytes / 2, to += rows * kRowChunkBytes) {
            int16_t chunk[kRowChunkBytes / 2];
            for (int step = 0; step < 8; step += 4) {
                const int8_t* from = integers + i + step;
                chunk[step] = from[0];
                chunk[step + 1] = from[2];
                chunk[step + 2] = from[1];
                chunk[step + 3] = from[3];
            }
            __builtin_memcpy(to, chunk, sizeof(chunk));
        }
    }
};

}  // namespace
}  // namespace aioserve::linear::grouped

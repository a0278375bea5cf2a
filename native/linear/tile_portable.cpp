// Tiles for any CPU, on the compiler's own vectors of four floats.

#include "linear/tile.h"

namespace aioserve::linear {
namespace {

typedef float Four __attribute__((vector_size(16)));
typedef std::uint32_t FourWords __attribute__((vector_size(16)));

struct Common {
    static constexpr int lanes = 4;
    using Sum = Four;
    using Weights = Four;
    using Input = Four;

    static Sum zero() { return Four{}; }
    static Sum multiply_add(Sum sum, Input x, Weights w) { return sum + x * w; }
    static Sum add_bias(Sum sum, const float* bias) {
        Four values;
        std::memcpy(&values, bias, sizeof values);
        return sum + values;
    }
    static void store_float32(float* y, Sum sum, int columns) {
        std::memcpy(y, &sum, sizeof(float) * static_cast<std::size_t>(columns < 4 ? columns : 4));
    }
    static void store_bfloat16(std::uint16_t* y, Sum sum, int columns) {
        for (int i = 0; i < (columns < lanes ? columns : lanes); ++i) y[i] = bfloat16_of(sum[i]);
    }
};

struct Float32 : Common {
    static constexpr int parts = 1;
    template <int>
    static Weights weights(const char* p) {
        Four values;
        std::memcpy(&values, p, sizeof values);
        return values;
    }
    template <int>
    static Input input(const char* p) {
        float value;
        std::memcpy(&value, p, 4);
        return Four{value, value, value, value};
    }
};

struct Bfloat16 : Common {
    static constexpr int parts = 2;  // the first of each pair, then the second
    template <int PART>
    static Four half(FourWords pairs) {
        const FourWords bits = PART == 0 ? pairs << 16 : pairs & 0xffff0000u;
        Four values;
        std::memcpy(&values, &bits, sizeof values);
        return values;
    }
    template <int PART>
    static Weights weights(const char* p) {
        FourWords pairs;
        std::memcpy(&pairs, p, sizeof pairs);
        return half<PART>(pairs);
    }
    template <int PART>
    static Input input(const char* p) {
        std::uint32_t pair;
        std::memcpy(&pair, p, 4);
        return half<PART>(FourWords{pair, pair, pair, pair});
    }
};

// A row's eight sums fill half of SSE's registers.
constexpr TileSet kFloat32 = tiles<Float32, 1>();
constexpr TileSet kBfloat16 = tiles<Bfloat16, 1>();

}  // namespace

const TileSet* portable_tiles(bool bfloat16) { return bfloat16 ? &kBfloat16 : &kFloat32; }

}  // namespace aioserve::linear

#include "dispatch.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "cpu.h"
#include "linear/decoded/tile.h"
#include "linear/grouped/tile.h"
#include "ops/types.h"

namespace aioserve {

// Defined in `ops/kernels_*.cpp`, `linear/tile_*.cpp`, and `tile_*.cpp` of `linear/grouped` and
// `linear/decoded`.
namespace ops {
extern const Table kPortable, kAvx2, kAvx512, kAvx512Bf16, kAvx512Bf16Emulated, kAmxBf16,
    kAmxBf16Emulated;
}
namespace linear {
extern const TileSet kPortableFloat32, kPortableBfloat16, kAvx2Float32, kAvx2Bfloat16,
    kAvx512Float32, kAvx512Bfloat16, kAvx512Bf16Bfloat16, kAvx512Bf16EmulatedBfloat16,
    kAmxBf16Bfloat16, kAmxBf16EmulatedBfloat16;
}
namespace linear::grouped {
extern const IntegerTiles kPortable, kAvx2, kAvx2Vnni, kAvx512, kAvx512Vnni, kAmxInt8,
    kAmxInt8Emulated;
}
namespace linear::decoded {
extern const Decoding kPortableFloat32, kPortableBfloat16, kAvx2Float32, kAvx2Bfloat16,
    kAvx512Float32, kAvx512Bfloat16, kAvx512Unpacked, kAvx512Bf16Bfloat16, kAvx512Bf16Unpacked;
}

namespace {

struct Decodings {
    const linear::decoded::Decoding* float32;
    const linear::decoded::Decoding* bfloat16;
};

struct Isa {
    const char* name;
    bool supported;
    bool emulated;  // for tests: never chosen unless it is named
    const ops::Table* ops;
    const linear::TileSet* float32_tiles;
    const linear::TileSet* bfloat16_tiles;
    const linear::grouped::IntegerTiles* integer_tiles;
    Decodings decodings;
};

#if defined(__x86_64__)
constexpr std::string_view kIsas =
    "portable avx2 avx2_vnni avx512 avx512_vnni avx512_bf16 amx_bf16 amx_int8 "
    "avx512_bf16_emulated amx_bf16_emulated amx_int8_emulated";
#else
constexpr std::string_view kIsas = "portable amx_bf16_emulated amx_int8_emulated";
#endif
constexpr std::string_view kCompiled = AIOSERVE_ISAS;  // by the build; names with a space between

constexpr bool has_word(std::string_view words, std::string_view word) {
    while (!words.empty()) {
        const size_t end = std::min(words.find(' '), words.size());
        if (words.substr(0, end) == word) return true;
        words.remove_prefix(std::min(end + 1, words.size()));
    }
    return false;
}

// The kernels of one that isn't compiled may not even be named, but where nothing is made of it.
#define AIOSERVE_ADD_ISA(name, ...) \
    if constexpr (has_word(kCompiled, name)) all.push_back({name, __VA_ARGS__})

std::vector<Isa> isas_of_this_machine() {
    using namespace ops;
    using namespace linear;
    namespace ints = linear::grouped;
    namespace codes = linear::decoded;
    const Decodings portable_codes{&codes::kPortableFloat32, &codes::kPortableBfloat16};
    std::vector<Isa> all{{"portable", true, false, &kPortable, &kPortableFloat32,
                          &kPortableBfloat16, &ints::kPortable, portable_codes}};
#if defined(__x86_64__)
    const Cpu cpu;
    AIOSERVE_ADD_ISA("avx2", cpu.avx2, false, &kAvx2, &kAvx2Float32, &kAvx2Bfloat16, &ints::kAvx2,
                     {&codes::kAvx2Float32, &codes::kAvx2Bfloat16});
    AIOSERVE_ADD_ISA("avx2_vnni", cpu.avx2_vnni, false, &kAvx2, &kAvx2Float32, &kAvx2Bfloat16,
                     &ints::kAvx2Vnni, {&codes::kAvx2Float32, &codes::kAvx2Bfloat16});
    AIOSERVE_ADD_ISA("avx512", cpu.avx512, false, &kAvx512, &kAvx512Float32, &kAvx512Bfloat16,
                     &ints::kAvx512, {&codes::kAvx512Float32, &codes::kAvx512Bfloat16});
    AIOSERVE_ADD_ISA("avx512_vnni", cpu.avx512_vnni, false, &kAvx512, &kAvx512Float32,
                     &kAvx512Bfloat16, &ints::kAvx512Vnni,
                     {&codes::kAvx512Float32, &codes::kAvx512Bfloat16});
    AIOSERVE_ADD_ISA("avx512_bf16", cpu.avx512_bf16, false, &kAvx512Bf16, &kAvx512Float32,
                     &kAvx512Bf16Bfloat16, &ints::kAvx512Vnni,
                     {&codes::kAvx512Float32, &codes::kAvx512Bf16Bfloat16});
    AIOSERVE_ADD_ISA("amx_bf16", cpu.amx_bf16, false, &kAmxBf16, &kAvx512Float32,
                     &kAmxBf16Bfloat16, &ints::kAvx512Vnni,
                     {&codes::kAvx512Float32, &codes::kAvx512Bf16Unpacked});
    AIOSERVE_ADD_ISA("amx_int8", cpu.amx_int8, false, &kAmxBf16, &kAvx512Float32,
                     &kAmxBf16Bfloat16, &ints::kAmxInt8,
                     {&codes::kAvx512Float32, &codes::kAvx512Bf16Unpacked});
    AIOSERVE_ADD_ISA("avx512_bf16_emulated", cpu.avx512, true, &kAvx512Bf16Emulated,
                     &kAvx512Float32, &kAvx512Bf16EmulatedBfloat16, &ints::kAvx512,
                     {&codes::kAvx512Float32, &codes::kAvx512Unpacked});
#endif
    AIOSERVE_ADD_ISA("amx_bf16_emulated", true, true, &kAmxBf16Emulated, &kPortableFloat32,
                     &kAmxBf16EmulatedBfloat16, &ints::kPortable, portable_codes);
    AIOSERVE_ADD_ISA("amx_int8_emulated", true, true, &kAmxBf16Emulated, &kPortableFloat32,
                     &kAmxBf16EmulatedBfloat16, &ints::kAmxInt8Emulated, portable_codes);
    return all;
}

// From the plainest to the best, then the emulated ones.
const std::vector<Isa>& isas() {
    static const std::vector<Isa> all = isas_of_this_machine();
    return all;
}

const Isa& find(const std::string& source, const std::string& name) {
    for (const Isa& isa : isas()) {
        if (name != isa.name) continue;
        if (isa.supported) return isa;
        throw std::invalid_argument(source + "='" + name + "' is not supported by this CPU");
    }
    if (has_word(kIsas, name))
        throw std::invalid_argument(source + "='" + name + "' is not in this build, which has " +
                                    AIOSERVE_ISAS + ": in a checkout, make build ISAS=all");
    throw std::invalid_argument(source + " must be one of " + std::string(kIsas) + "; got '" + name +
                                "'");
}

std::atomic<const Isa*> g_used{nullptr};

const Isa& used() {
    if (const Isa* isa = g_used.load(std::memory_order_acquire)) return *isa;
    const Isa* chosen = nullptr;
    if (const char* name = std::getenv("AIOSERVE_ISA"); name && *name) {
        chosen = &find("AIOSERVE_ISA", name);
    } else {
        for (const Isa& isa : isas())
            if (isa.supported && !isa.emulated) chosen = &isa;
    }
    g_used.store(chosen, std::memory_order_release);
    return *chosen;
}

}  // namespace

const ops::Kernels& kernels(ops::DType dtype) {
    const ops::Table& table = *used().ops;
    return dtype == ops::DType::bfloat16 ? table.bfloat16 : table.float32;
}

const linear::TileSet& tiles_in_use(bool bfloat16) {
    return bfloat16 ? *used().bfloat16_tiles : *used().float32_tiles;
}

const linear::grouped::StorageTiles& integer_tiles_in_use(int storage) {
    return used().integer_tiles->of[storage];
}

const linear::decoded::Decoding& decoding_in_use(bool bfloat16) {
    const Decodings& decodings = used().decodings;
    return bfloat16 ? *decodings.bfloat16 : *decodings.float32;
}

std::vector<std::string> compiled_isas() {
    std::istringstream words{std::string(kCompiled)};
    std::vector<std::string> names{std::istream_iterator<std::string>(words), {}};
    std::erase_if(names, [](const std::string& name) { return !has_word(kIsas, name); });
    return names;
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas())
        if (isa.supported && !isa.emulated) names.push_back(isa.name);
    return names;
}

std::vector<std::string> emulated_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas())
        if (isa.supported && isa.emulated) names.push_back(isa.name);
    return names;
}

std::string used_isa() { return used().name; }

std::string used_integer_isa() {
    for (const Isa& isa : isas())
        if (isa.integer_tiles == used().integer_tiles) return isa.name;
    return used().name;
}

void set_isa(const std::string& name) { g_used.store(&find("isa", name)); }

}  // namespace aioserve

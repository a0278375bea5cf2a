#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "linear/decoded/tile.h"
#include "linear/grouped/tile.h"
#include "ops/types.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

// Bits of what CPUID says of a CPU.
constexpr unsigned kCpuAmxBf16 = 1u << 22, kCpuAmxTile = 1u << 24, kCpuAmxInt8 = 1u << 25;

// Whether this process may use AMX's tiles for `products`: the CPU has them, the system saves tiles,
// and grants this process the memory for it, which a process has to ask for once.
bool may_use_amx(unsigned products) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned needed = products | kCpuAmxTile;
    if ((d & needed) != needed) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
    uint32_t saved, saved_high;
    asm("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    constexpr uint32_t kTileState = 3u << 17;
    if ((saved & kTileState) != kTileState) return false;
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

#endif

std::vector<Isa> isas_of_this_machine() {
    using namespace ops;
    using namespace linear;
    namespace ints = linear::grouped;
    namespace codes = linear::decoded;
    const Decodings portable_codes{&codes::kPortableFloat32, &codes::kPortableBfloat16};
    std::vector<Isa> all{{"portable", true, false, &kPortable, &kPortableFloat32,
                          &kPortableBfloat16, &ints::kPortable, portable_codes}};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx2_vnni = avx2 && __builtin_cpu_supports("avxvnni");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq");
    const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    const bool amx_bf16 = avx512_bf16 && may_use_amx(kCpuAmxBf16);
    const bool amx_int8 = amx_bf16 && avx512_vnni && may_use_amx(kCpuAmxInt8);
    const auto* best_ints = avx512_vnni ? &ints::kAvx512Vnni : &ints::kAvx512;
    const Decodings avx2_codes{&codes::kAvx2Float32, &codes::kAvx2Bfloat16};
    const Decodings avx512_codes{&codes::kAvx512Float32, &codes::kAvx512Bfloat16};
    const Decodings bf16_codes{&codes::kAvx512Float32, &codes::kAvx512Bf16Bfloat16};
    const Decodings amx_codes{&codes::kAvx512Float32, &codes::kAvx512Bf16Unpacked};
    const Decodings emulated_codes{&codes::kAvx512Float32, &codes::kAvx512Unpacked};
    all.push_back({"avx2", avx2, false, &kAvx2, &kAvx2Float32, &kAvx2Bfloat16, &ints::kAvx2,
                   avx2_codes});
    all.push_back({"avx2_vnni", avx2_vnni, false, &kAvx2, &kAvx2Float32, &kAvx2Bfloat16,
                   &ints::kAvx2Vnni, avx2_codes});
    all.push_back({"avx512", avx512, false, &kAvx512, &kAvx512Float32, &kAvx512Bfloat16,
                   &ints::kAvx512, avx512_codes});
    all.push_back({"avx512_vnni", avx512_vnni, false, &kAvx512, &kAvx512Float32, &kAvx512Bfloat16,
                   &ints::kAvx512Vnni, avx512_codes});
    all.push_back({"avx512_bf16", avx512_bf16, false, &kAvx512Bf16, &kAvx512Float32,
                   &kAvx512Bf16Bfloat16, best_ints, bf16_codes});
    all.push_back({"amx_bf16", amx_bf16, false, &kAmxBf16, &kAvx512Float32, &kAmxBf16Bfloat16,
                   best_ints, amx_codes});
    all.push_back({"amx_int8", amx_int8, false, &kAmxBf16, &kAvx512Float32, &kAmxBf16Bfloat16,
                   &ints::kAmxInt8, amx_codes});
    all.push_back({"avx512_bf16_emulated", avx512, true, &kAvx512Bf16Emulated, &kAvx512Float32,
                   &kAvx512Bf16EmulatedBfloat16, best_ints, emulated_codes});
#endif
    all.push_back({"amx_bf16_emulated", true, true, &kAmxBf16Emulated, &kPortableFloat32,
                   &kAmxBf16EmulatedBfloat16, &ints::kPortable, portable_codes});
    all.push_back({"amx_int8_emulated", true, true, &kAmxBf16Emulated, &kPortableFloat32,
                   &kAmxBf16EmulatedBfloat16, &ints::kAmxInt8Emulated, portable_codes});
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
    std::string names;
    for (const Isa& isa : isas()) names += std::string(names.empty() ? "" : ", ") + isa.name;
    throw std::invalid_argument(source + " must be one of " + names + "; got '" + name + "'");
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

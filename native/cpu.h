// What the CPU and the system let this process compute with. The build asks as well, for the kernels
// that a checkout needs: see `print_isa.cpp`.

#pragma once

#if defined(__x86_64__)

#include <cpuid.h>

#include <cstdint>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace aioserve {

// Bits of what CPUID says of a CPU.
constexpr unsigned kCpuAmxBf16 = 1u << 22, kCpuAmxTile = 1u << 24, kCpuAmxInt8 = 1u << 25;

// Whether this process may use AMX's tiles for `products`: the CPU has them, the system saves tiles,
// and grants this process the memory for it, which a process has to ask for once.
inline bool may_use_amx(unsigned products) {
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

// Instruction sets, each with those that its kernels use besides.
struct Cpu {
    bool avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16, amx_bf16, amx_int8;

    Cpu() {
        __builtin_cpu_init();
        avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
        avx2_vnni = avx2 && __builtin_cpu_supports("avxvnni");
        avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
        avx512_bf16 = avx512_vnni && __builtin_cpu_supports("avx512bf16");
        amx_bf16 = avx512_bf16 && may_use_amx(kCpuAmxBf16);
        amx_int8 = amx_bf16 && may_use_amx(kCpuAmxInt8);
    }
};

}  // namespace aioserve

#endif

namespace aioserve {

// The best one that this machine has, compiled or not.
inline const char* best_isa() {
#if defined(__x86_64__)
    const Cpu cpu;
    if (cpu.amx_int8) return "amx_int8";
    if (cpu.amx_bf16) return "amx_bf16";
    if (cpu.avx512_bf16) return "avx512_bf16";
    if (cpu.avx512_vnni) return "avx512_vnni";
    if (cpu.avx512) return "avx512";
    if (cpu.avx2_vnni) return "avx2_vnni";
    if (cpu.avx2) return "avx2";
#endif
    return "portable";
}

}  // namespace aioserve

// A program of the build's own: the instruction set that a checkout needs kernels for.

#include <cstdio>

#include "cpu.h"

int main() { std::puts(aioserve::best_isa()); }

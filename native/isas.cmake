# Which instruction sets the module has kernels for: AIOSERVE_ISAS, and their files: KERNEL_SOURCES.
# PORTABLE_IS_TO_COMPARE: this machine works with better ones.
#
# `all` is for wheels, which run anywhere. `native` is for a checkout: what is portable, and the best
# that this machine has. Or names, with a semicolon between.
set(AIOSERVE_ISAS all CACHE STRING "Instruction sets of the kernels: all, native, or a list")

# The files of each, as its row in dispatch.cpp names them.
set(FILES_portable ops/kernels_portable linear/tile_portable linear/decoded/tile_portable
  linear/grouped/tile_portable)
set(FILES_avx2 ops/kernels_avx2 linear/tile_avx2 linear/decoded/tile_avx2 linear/grouped/tile_avx2)
set(FILES_avx2_vnni ops/kernels_avx2 linear/tile_avx2 linear/decoded/tile_avx2
  linear/grouped/tile_avx2_vnni)
set(FILES_avx512 ops/kernels_avx512 linear/tile_avx512 linear/decoded/tile_avx512
  linear/grouped/tile_avx512)
set(FILES_avx512_vnni ops/kernels_avx512 linear/tile_avx512 linear/decoded/tile_avx512
  linear/grouped/tile_avx512_vnni)
set(FILES_avx512_bf16 ops/kernels_avx512_bf16 linear/tile_avx512 linear/tile_avx512_bf16
  linear/decoded/tile_avx512 linear/decoded/tile_avx512_bf16 linear/grouped/tile_avx512_vnni)
set(FILES_amx_bf16 ops/kernels_amx_bf16 linear/tile_avx512 linear/tile_amx_bf16
  linear/decoded/tile_avx512 linear/decoded/tile_avx512_bf16 linear/grouped/tile_avx512_vnni)
set(FILES_amx_int8 ops/kernels_amx_bf16 linear/tile_avx512 linear/tile_amx_bf16
  linear/decoded/tile_avx512 linear/decoded/tile_avx512_bf16 linear/grouped/tile_amx_int8)
set(FILES_avx512_bf16_emulated ops/kernels_avx512_bf16_emulated linear/tile_avx512
  linear/tile_avx512_bf16_emulated linear/decoded/tile_avx512 linear/grouped/tile_avx512)
set(FILES_amx_bf16_emulated ops/kernels_amx_bf16_emulated linear/tile_amx_bf16_emulated)
set(FILES_amx_int8_emulated ops/kernels_amx_bf16_emulated linear/tile_amx_bf16_emulated
  linear/grouped/tile_amx_int8_emulated)

set(PORTABLE_IS_TO_COMPARE OFF)
set(ALL_ISAS portable avx2 avx2_vnni avx512 avx512_vnni avx512_bf16 amx_bf16 amx_int8
  avx512_bf16_emulated amx_bf16_emulated amx_int8_emulated)
if(AIOSERVE_ISAS STREQUAL "all")
  set(AIOSERVE_ISAS ${ALL_ISAS})
elseif(AIOSERVE_ISAS STREQUAL "native")
  unset(RUNS CACHE)  # another machine may have this build directory now
  try_run(RUNS COMPILES ${CMAKE_BINARY_DIR}/print_isa ${CMAKE_CURRENT_LIST_DIR}/print_isa.cpp
    RUN_OUTPUT_VARIABLE isa)
  if(NOT COMPILES OR NOT "${RUNS}" STREQUAL "0")
    message(FATAL_ERROR "native/print_isa.cpp doesn't run here: set AIOSERVE_ISAS to all")
  endif()
  string(STRIP "${isa}" isa)
  set(AIOSERVE_ISAS portable ${isa})
  if(NOT isa STREQUAL "portable")
    set(PORTABLE_IS_TO_COMPARE ON)
  endif()
endif()
list(PREPEND AIOSERVE_ISAS portable)
list(REMOVE_DUPLICATES AIOSERVE_ISAS)

set(KERNEL_SOURCES "")
foreach(isa ${AIOSERVE_ISAS})
  if(NOT isa IN_LIST ALL_ISAS)
    message(FATAL_ERROR "AIOSERVE_ISAS must be all, native, or some of ${ALL_ISAS}; got ${isa}")
  endif()
  list(TRANSFORM FILES_${isa} REPLACE "(.+)" "${CMAKE_CURRENT_LIST_DIR}/\\1.cpp" OUTPUT_VARIABLE files)
  list(APPEND KERNEL_SOURCES ${files})
endforeach()
list(REMOVE_DUPLICATES KERNEL_SOURCES)

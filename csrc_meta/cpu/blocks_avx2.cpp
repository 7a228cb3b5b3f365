#if defined(__x86_64__)

#include <immintrin.h>

#include "blocks.h"

// The target is set here rather than by compiler flags, which a build would have to give file by file.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#pragma GCC diagnostic ignored "-Wuninitialized"  // in GCC 12's own immintrin.h
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define VECTOR_BYTES 32

namespace xent::cpu::avx2 {
namespace {
#include "simd.h"

#include "blocks.inl"
}  // namespace

const Blocks<float> float_blocks = XENT_BLOCKS("avx2", float);
const Blocks<double> double_blocks = XENT_BLOCKS("avx2", double);
}  // namespace xent::cpu::avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

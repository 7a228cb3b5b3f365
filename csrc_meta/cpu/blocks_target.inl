// The loops for one instruction set. The file that includes this defines XENT_NAME, a namespace, VECTOR_BYTES, and
// XENT_TARGET, GCC's and Clang's name of the set, unless it is the compiler's default. The target is set here, because
// with compiler flags a build would need different flags for each file.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "blocks.h"

#define XENT_PRAGMA_OF(text) _Pragma(#text)
#define XENT_PRAGMA(text) XENT_PRAGMA_OF(text)
#define XENT_STRING_OF(text) #text
#define XENT_STRING(text) XENT_STRING_OF(text)

#if defined(__clang__) && defined(XENT_TARGET)
XENT_PRAGMA(clang attribute push(__attribute__((target(XENT_TARGET))), apply_to = function))
#elif defined(XENT_TARGET)
#pragma GCC push_options
XENT_PRAGMA(GCC target(XENT_TARGET))
#pragma GCC diagnostic ignored "-Wuninitialized"  // in GCC 12's own immintrin.h
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace xent::cpu::XENT_NAME {
namespace {
#include "simd.h"

#include "blocks.inl"
}  // namespace

const InstructionSet loops = {XENT_STRING(XENT_NAME),
                              {kBlocks<float, float>, kBlocks<Bfloat16, float>, kBlocks<Float16, float>},
                              kBlocks<double, double>};
}  // namespace xent::cpu::XENT_NAME

#if defined(__clang__) && defined(XENT_TARGET)
#pragma clang attribute pop
#elif defined(XENT_TARGET)
#pragma GCC pop_options
#endif

#include "blocks.h"

// Whatever the compiler targets by default: SSE2 on x86-64, NEON on aarch64.
#define VECTOR_BYTES 16

namespace xent::cpu::generic {
namespace {
#include "simd.h"

#include "blocks.inl"
}  // namespace

const Blocks<float> float_blocks = XENT_BLOCKS("default", float);
const Blocks<double> double_blocks = XENT_BLOCKS("default", double);
}  // namespace xent::cpu::generic

// Chooses the best compiled instruction set that this processor supports.

#include <cstdlib>
#include <cstring>

#include "blocks.h"

namespace xent::cpu {
namespace {

struct Choice {
  const Blocks<float>& in_float;
  const Blocks<double>& in_double;
};

Choice choose() {
#if defined(__x86_64__)
  const char* wish = std::getenv("ATEN_CPU_CAPABILITY");
  const bool up_to_avx2 = wish != nullptr && std::strcmp(wish, "avx2") == 0;
  const bool nothing_special = wish != nullptr && std::strcmp(wish, "default") == 0;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512 && !up_to_avx2 && !nothing_special) return {avx512::float_blocks, avx512::double_blocks};
  if (avx2 && !nothing_special) return {avx2::float_blocks, avx2::double_blocks};
#endif
  return {generic::float_blocks, generic::double_blocks};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

template <>
const Blocks<float>& blocks<float>() {
  return choice().in_float;
}

template <>
const Blocks<double>& blocks<double>() {
  return choice().in_double;
}

const char* instruction_set() {
  return &choice().in_float == &generic::float_blocks ? "default" : choice().in_float.name;
}

}  // namespace xent::cpu

// Chooses the best compiled instruction set that this processor supports.

#include <cstdlib>
#include <cstring>

#include "blocks.h"

namespace xent::cpu {
namespace {

const InstructionSet& choose() {
#if defined(__x86_64__)
  const char* wish = std::getenv("ATEN_CPU_CAPABILITY");
  const bool up_to_avx2 = wish != nullptr && std::strcmp(wish, "avx2") == 0;
  const bool nothing_special = wish != nullptr && std::strcmp(wish, "default") == 0;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512 && !up_to_avx2 && !nothing_special) return avx512::loops;
  if (avx2 && !nothing_special) return avx2::loops;
#endif
  return generic::loops;
}

}  // namespace

const InstructionSet& best_loops() {
  static const InstructionSet& chosen = choose();
  return chosen;
}

const char* instruction_set() { return &best_loops() == &generic::loops ? "default" : best_loops().name; }

}  // namespace xent::cpu

// Huge pages for a large gradient, because page faults of 4 KiB cost more than its arithmetic.

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "rows.h"

namespace xent::cpu {

void prefer_huge_pages([[maybe_unused]] const Problem& problem, [[maybe_unused]] const MutableRows& grad) {
#if defined(MADV_HUGEPAGE)
  // From this size on glibc maps each allocation separately, so the advice ends with the tensor.
  constexpr std::int64_t kMapped = std::int64_t(32) << 20;
  constexpr std::uintptr_t kHugePage = std::uintptr_t(2) << 20;
  const std::int64_t bytes = problem.rows * problem.classes * size_of(problem.dtype);
  const bool dense = grad.inner >= problem.rows && grad.stride == problem.classes;
  if (!dense || grad.data == problem.logits.data || bytes < kMapped) return;
  const std::uintptr_t data = reinterpret_cast<std::uintptr_t>(grad.data);
  const std::uintptr_t begin = (data + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (data + bytes) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: a refusal changes nothing
#endif
}

}  // namespace xent::cpu

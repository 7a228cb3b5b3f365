// Whatever the compiler targets by default: SSE2 on x86-64, NEON on aarch64.
#define XENT_NAME generic
#define VECTOR_BYTES 16
#include "blocks_target.inl"

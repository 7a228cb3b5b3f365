#if defined(__x86_64__)
#define XENT_NAME avx2
#define XENT_TARGET "avx2,fma,f16c"
#define VECTOR_BYTES 32
#include "blocks_target.inl"
#endif

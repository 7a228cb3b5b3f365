#if defined(__x86_64__)
#define XENT_NAME avx512
#define XENT_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define VECTOR_BYTES 64
#include "blocks_target.inl"
#endif

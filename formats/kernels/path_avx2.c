/* The avx2 path. */
#include "kernels.h"
#ifdef MOEPACK_X86
#include <immintrin.h> /* before the switch, which is for our functions only */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define PATH_NAME avx2
#define PATH_LABEL "avx2"
#define PATH_SIMD "simd_avx2.h"
#include "path.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

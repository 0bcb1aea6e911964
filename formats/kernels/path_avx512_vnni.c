/* The avx512 path. */
#include "kernels.h"
#ifdef MOEPACK_X86
#include <immintrin.h> /* before the switch, which is for our functions only */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#define MOEPACK_VNNI 1
#define PATH_NAME avx512_vnni
#define PATH_LABEL "avx512"
#define PATH_SIMD "simd_avx512.h"
#include "path.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

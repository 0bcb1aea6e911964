/* The kernels of one path, as functions and as a table of them. */
#ifndef MOEPACK_KERNELS_H
#define MOEPACK_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Arrays are contiguous and their lengths checked by the caller. Counts and lengths may exceed 32 bits. */
struct kernels {
    const char *name;
    /* Bytes of memory, 64-aligned, that encode works in. */
    size_t (*search_bytes)(void);
    /* Indices uint8 [count][stages] of vectors float32 [count][8] under codebooks float32 [stages][entries][8].
     * Widths int [stages]: candidates that go on after each stage; that of the last stage is not used. */
    void (*encode)(void *memory, const float *vectors, int64_t count, const float *codebooks, int stages, int entries,
                   const int *widths, uint8_t *codes);
    void (*fit_counts)(const float *vectors, const uint8_t *codes, int64_t count, int stages, int entries,
                       uint32_t *pairs, uint32_t *totals, double *sums);
    void (*fit_moments)(const float *vectors, const float *weights, const uint8_t *codes, int64_t count, int stages,
                        int entries, double *pairs, double *totals, double *sums);
    void (*sweep_counts)(double *codebooks, int stages, int entries, const uint32_t *pairs, const uint32_t *totals,
                         const double *sums, int sweeps);
    void (*sweep_moments)(double *codebooks, int stages, int entries, const double *pairs, const double *totals,
                          const double *sums, int sweeps);
    void (*decode_rvq)(const uint8_t *codes, const float *codebooks, const float *scales, int64_t rows, int64_t cols,
                       int stages, int entries, float *values);
    void (*pack_rvq)(const uint8_t *plain, int64_t rows, int64_t vectors, int stages, uint8_t *packed);
    void (*unpack_rvq)(const uint8_t *packed, int64_t rows, int64_t vectors, int stages, uint8_t *plain);
    void (*decode_mxfp4)(const uint8_t *codes, const uint8_t *scales, const float *pairs, const float *factors,
                         int64_t rows, int64_t cols, float *values);
    void (*decode_group_int)(const uint8_t *codes, const float *factors, int64_t rows, int64_t cols, int bits,
                             int64_t group, float *values);
    void (*fit_group_int)(const float *values, int64_t rows, int64_t cols, int bits, int64_t group, int exponent,
                          uint16_t *scales);
    void (*row_sums)(const float *a, const float *b, const float *weights, int64_t rows, int64_t cols, double *sums);
    void (*half_to_single)(const uint16_t *from, int64_t count, float *to);
    void (*single_to_half)(const float *from, int64_t count, uint16_t *to);
    void (*bfloat16_to_single)(const uint16_t *from, int64_t count, float *to);
    int64_t (*peak)(int64_t rounds, float *out);
};

extern const struct kernels moepack_portable;
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define MOEPACK_X86 1
extern const struct kernels moepack_avx2, moepack_avx512, moepack_avx512_vnni;
#endif

#endif

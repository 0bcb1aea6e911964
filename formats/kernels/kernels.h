/* The kernels of one path, as functions and as a table of them. */
#ifndef MOEPACK_KERNELS_H
#define MOEPACK_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Plain weights. */
enum { RAW_F32, RAW_BF16, RAW_F16 };

/* A product of some rows of a matrix with inputs: row r and input t give out[t * width + at + r - first]. */
struct product {
    const float *inputs; /* [count][cols] */
    int64_t count, cols, first, stop;
    float *out; /* [count][width] */
    int64_t width, at;
};

/* A product with a matrix itself: for columns first to stop the sums over rows row_first to row_stop. */
struct transposed {
    const float *inputs; /* [count][row_stop - row_first] */
    int64_t count, cols, row_first, row_stop, first, stop;
    float *out; /* [count][width] */
    int64_t width, at;
};

/* One of the matrices of an rvq product, which share all but these; out is that of struct product. */
struct rvq_matrix {
    const uint8_t *codes;   /* [blocks][vectors][stages][64] */
    const uint16_t *scales; /* float16 [all rows] */
    int exponent;
    float *out;
};

/* Extents of KDA steps, for heads first to stop. */
struct kda {
    int64_t tokens, heads, dk, dv, first, stop;
};

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
    /* Products (products.md); 0 if memory was short. Float16 numbers come by their bits. */
    int (*multiply_raw)(const struct product *p, const uint8_t *values, int kind);
    int (*multiply_mxfp4)(const struct product *p, const uint8_t *codes, const uint8_t *scales, int bias);
    int (*multiply_group_int)(const struct product *p, const uint8_t *codes, const uint16_t *scales, int bits,
                              int64_t group, int exponent);
    int (*multiply_rvq)(const struct product *p, const struct rvq_matrix *matrices, int count,
                        const uint16_t *codebooks, int stages, int entries);
    void (*transposed_raw)(const struct transposed *p, const uint8_t *values, int kind);
    void (*transposed_group_int)(const struct transposed *p, const uint8_t *codes, const uint16_t *scales, int bits,
                                 int64_t group, int exponent);
    void (*kda_steps)(const struct kda *extents, float *state, const float *q, const float *k, const float *v,
                      const float *decay, const float *beta, float *out);
    int64_t (*peak)(int64_t rounds, float *out);
};

extern const struct kernels moepack_portable;
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define MOEPACK_X86 1
extern const struct kernels moepack_avx2, moepack_avx512, moepack_avx512_vnni;
#endif

#endif

// Which order of rvq indices serves a matrix-vector product best? See README.md.
//
// One thread multiplies K3's gate matrix (3072 x 3584, 3 stages of 256 entries) with a vector, again and again
// with other indices out of a pool that no cache holds, so that every index comes from memory:
//   row-major  [row][vector][stage]          entries: add the 3 entries, multiply with 8 inputs
//   blocked    [block][vector][stage][64]    entries: the same
//   row-major                                tables:  256 products entry.inputs a vector and stage, looked up and added
//   blocked                                  tables:  the same, 16 look-ups an instruction
//   blocked                                  tables:  of 16-bit or 8-bit integers, 64 look-ups by byte shuffles
// Filling the tables is part of the time. Every variant is compared with a plain loop in double precision first.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROWS = 3072, COLS = 3584, DIM = 8, STAGES = 3, ENTRIES = 256, LINE = 64, PASSES = 9 };
enum { VECTORS = COLS / DIM, BLOCKS = ROWS / LINE, CODES = ROWS * VECTORS * STAGES, NUMBERS = VECTORS * STAGES * ENTRIES };

typedef float Eight __attribute__((vector_size(32)));
static float books[STAGES][ENTRIES][DIM] __attribute__((aligned(64)));
static float inputs[COLS] __attribute__((aligned(64)));
static float scales[ROWS], out[ROWS];
static float table[NUMBERS] __attribute__((aligned(64)));  // [vector][stage][entry]
static uint8_t planes[2 * NUMBERS] __attribute__((aligned(64)));  // the same as bytes, or as low and high bytes

static double now(void) {
    struct timespec time;
    return clock_gettime(CLOCK_MONOTONIC, &time), time.tv_sec + 1e-9 * time.tv_nsec;
}
static uint64_t state = 88172645463325252u;  // xorshift
static uint64_t draw(void) { return state ^= state << 13, state ^= state >> 7, state ^= state << 17; }
static float gauss(void) {
    float sum = -6;
    for (int i = 0; i < 12; i++) sum += (float)(draw() >> 40) / (1 << 24);
    return sum;
}
static float total(Eight v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// The reference: the page's arithmetic for every weight, products summed in double precision.
static void plain(const uint8_t *rowmajor, double *result) {
    for (int row = 0; row < ROWS; row++) {
        double sum = 0;
        for (int vector = 0; vector < VECTORS; vector++) {
            const uint8_t *code = rowmajor + ((size_t)row * VECTORS + vector) * STAGES;
            for (int i = 0; i < DIM; i++) {
                float weight = ((books[0][code[0]][i] + books[1][code[1]][i]) + books[2][code[2]][i]) * scales[row];
                sum += (double)weight * inputs[vector * DIM + i];
            }
        }
        result[row] = sum;
    }
}

static void rowmajor_entries(const uint8_t *code) {
    for (int row = 0; row < ROWS; row++) {
        Eight sum = {0};
        for (int vector = 0; vector < VECTORS; vector++, code += STAGES) {
            Eight weights = *(Eight *)books[0][code[0]] + *(Eight *)books[1][code[1]] + *(Eight *)books[2][code[2]];
            sum += weights * *(Eight *)&inputs[vector * DIM];
        }
        out[row] = total(sum) * scales[row];
    }
}

static void blocked_entries(const uint8_t *code) {
    for (int block = 0; block < BLOCKS; block++) {
        Eight sums[LINE] = {{0}};
        for (int vector = 0; vector < VECTORS; vector++, code += STAGES * LINE) {
            Eight x = *(Eight *)&inputs[vector * DIM];
            for (int i = 0; i < LINE; i++) {
                Eight weights = *(Eight *)books[0][code[i]] + *(Eight *)books[1][code[LINE + i]];
                sums[i] += (weights + *(Eight *)books[2][code[2 * LINE + i]]) * x;
            }
        }
        for (int i = 0; i < LINE; i++) out[block * LINE + i] = total(sums[i]) * scales[block * LINE + i];
    }
}

static float turned[STAGES][DIM][ENTRIES] __attribute__((aligned(64)));  // the codebooks, a component at a time

static void fill_table(void) {
    for (int vector = 0; vector < VECTORS; vector++)
        for (int stage = 0; stage < STAGES; stage++) {
            const float *x = inputs + vector * DIM;
            float *restrict to = table + (vector * STAGES + stage) * ENTRIES, (*t)[ENTRIES] = turned[stage];
            for (int e = 0; e < ENTRIES; e++)
                to[e] = x[0] * t[0][e] + x[1] * t[1][e] + x[2] * t[2][e] + x[3] * t[3][e] + x[4] * t[4][e] +
                        x[5] * t[5][e] + x[6] * t[6][e] + x[7] * t[7][e];
        }
}

static void rowmajor_tables(const uint8_t *code) {
    fill_table();
    for (int row = 0; row < ROWS; row++) {
        float sum[4] = {0};
        const float *at = table;
        for (int vector = 0; vector < VECTORS; vector += 4)
            for (int i = 0; i < 4; i++, code += STAGES, at += STAGES * ENTRIES)
                sum[i] += at[code[0]] + at[ENTRIES + code[1]] + at[2 * ENTRIES + code[2]];
        out[row] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) * scales[row];
    }
}

#ifdef __AVX512VBMI__
static void blocked_tables(const uint8_t *code) {
    fill_table();
    for (int block = 0; block < BLOCKS; block++) {
        __m512 sums[4] = {{0}};
        for (const float *at = table; at < table + NUMBERS; at += ENTRIES, code += LINE)
            for (int i = 0; i < 4; i++) {
                __m512i index = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)(code + 16 * i)));
                sums[i] = _mm512_add_ps(sums[i], _mm512_i32gather_ps(index, at, 4));
            }
        for (int i = 0, at = block * LINE; i < 4; i++, at += 16)
            _mm512_storeu_ps(out + at, _mm512_mul_ps(sums[i], _mm512_loadu_ps(scales + at)));
    }
}

// The step of integer tables whose largest magnitude is `limit`, and 16 numbers of the table in that step.
static float fill_step(float limit) {
    __m512 most = _mm512_setzero_ps();
    fill_table();
    for (int i = 0; i < NUMBERS; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_load_ps(table + i)));
    return _mm512_reduce_max_ps(most) / limit;
}
static inline __m512i integers(int i, float step) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(table + i), _mm512_set1_ps(1 / step)));
}

// 64 bytes out of a table of 256: two shuffles of 128 entries each and the top bit to choose.
static inline __m512i shuffle(const __m512i *t, __m512i index) {
    __m512i low = _mm512_permutex2var_epi8(t[0], index, t[1]), high = _mm512_permutex2var_epi8(t[2], index, t[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
}

// Bytes 0..63 of low and high planes become 16-bit numbers, widened to 32 bits for the sum.
static void blocked_shuffle16(const uint8_t *code) {
    float step = fill_step(32767 / 3);  // so that the three stages of a vector add up in 16 bits
    for (int i = 0; i < NUMBERS; i += 16) {
        uint8_t *to = planes + i / ENTRIES * 2 * ENTRIES + i % ENTRIES;
        _mm_store_si128((__m128i *)to, _mm512_cvtepi32_epi8(integers(i, step)));
        _mm_store_si128((__m128i *)(to + ENTRIES), _mm512_cvtepi32_epi8(_mm512_srai_epi32(integers(i, step), 8)));
    }
    for (int block = 0; block < BLOCKS; block++) {
        __m512i wide[4] = {{0}};
        const __m512i *t = (const __m512i *)planes;
        for (int vector = 0; vector < VECTORS; vector++) {
            __m512i even = {0}, odd = {0};
            for (int stage = 0; stage < STAGES; stage++, code += LINE, t += 8) {
                __m512i index = _mm512_load_si512(code);
                __m512i low = shuffle(t, index), high = shuffle(t + 4, index);
                even = _mm512_add_epi16(even, _mm512_unpacklo_epi8(low, high));
                odd = _mm512_add_epi16(odd, _mm512_unpackhi_epi8(low, high));
            }
            for (int i = 0; i < 4; i++) {  // times (1, 0) or (0, 1): every other 16-bit number, widened
                __m512i every_other = _mm512_madd_epi16(i < 2 ? even : odd, _mm512_set1_epi32(i % 2 ? 0x10000 : 1));
                wide[i] = _mm512_add_epi32(wide[i], every_other);
            }
        }
        int32_t sums[4][16];
        memcpy(sums, wide, sizeof sums);
        for (int row = 0; row < LINE; row++) {  // undo the order of unpack: 16-byte lanes of 8 + 8 rows
            int32_t sum = sums[row / 8 % 2 * 2 + row % 2][row / 16 * 4 + row % 8 / 2];
            out[block * LINE + row] = (float)sum * step * scales[block * LINE + row];
        }
    }
}

static void blocked_shuffle8(const uint8_t *code) {
    float step = fill_step(127);
    for (int i = 0; i < NUMBERS; i += 16)
        _mm_store_si128((__m128i *)(planes + i), _mm512_cvtepi32_epi8(integers(i, step)));
    for (int block = 0; block < BLOCKS; block++) {
        int32_t sums[LINE] = {0};
        const __m512i *t = (const __m512i *)planes;
        for (int first = 0; first < VECTORS; first += 64) {  // 64 x 3 x 127 fits 16 bits
            __m512i low = {0}, high = {0};
            for (int i = 0; i < 64 * STAGES; i++, code += LINE, t += 4) {
                __m512i found = shuffle(t, _mm512_load_si512(code));
                low = _mm512_add_epi16(low, _mm512_cvtepi8_epi16(_mm512_castsi512_si256(found)));
                high = _mm512_add_epi16(high, _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(found, 1)));
            }
            int16_t part[LINE];
            memcpy(part, &low, 64), memcpy(part + 32, &high, 64);
            for (int row = 0; row < LINE; row++) sums[row] += part[row];
        }
        for (int i = 0; i < LINE; i++) out[block * LINE + i] = (float)sums[i] * step * scales[block * LINE + i];
    }
}
#endif

typedef struct { const char *name; void (*run)(const uint8_t *); int blocked; double limit; } Variant;

static const Variant variants[] = {
    {"row-major, entries, float32", rowmajor_entries, 0, 1e-5},
    {"blocked,   entries, float32", blocked_entries, 1, 1e-5},
    {"row-major, tables,  float32", rowmajor_tables, 0, 1e-5},
#ifdef __AVX512VBMI__
    {"blocked,   tables,  float32", blocked_tables, 1, 1e-5},
    {"blocked,   tables,  16 bits", blocked_shuffle16, 1, 1e-3},
    {"blocked,   tables,   8 bits", blocked_shuffle8, 1, 5e-2},
#endif
};
enum { VARIANTS = sizeof variants / sizeof *variants };
static int compare(const void *a, const void *b) { return *(double *)a < *(double *)b ? -1 : 1; }

int main(int argc, char **argv) {
    int pool = argc > 1 ? atoi(argv[1]) : 100;  // 100 x 4.1 MB
    for (int i = 0; i < STAGES * ENTRIES * DIM; i++) {
        int stage = i / DIM / ENTRIES, entry = i / DIM % ENTRIES;
        turned[stage][i % DIM][entry] = books[stage][entry][i % DIM] = gauss() * powf(0.58f, stage);
    }
    for (int i = 0; i < COLS; i++) inputs[i] = gauss();
    for (int i = 0; i < ROWS; i++) scales[i] = 0.02f * (1 + (float)(draw() % 100) / 100);
    uint8_t *codes = aligned_alloc(4096, (size_t)pool * CODES), *blocked = aligned_alloc(4096, CODES);
    if (pool < 1 || !codes || !blocked) return 4;
    for (size_t i = 0; i < (size_t)pool * CODES; i += 8) *(uint64_t *)(codes + i) = draw();
    for (int i = 0; i < CODES; i++) {
        int row = i / (VECTORS * STAGES), place = i % (VECTORS * STAGES);
        blocked[(row / LINE * VECTORS * STAGES + place) * LINE + row % LINE] = codes[i];
    }
    static double expected[ROWS], seconds[VARIANTS][PASSES], ratios[VARIANTS][PASSES], errors[VARIANTS];
    plain(codes, expected);
    for (int i = 0; i < VARIANTS; i++) {
        double wrong = 0, norm = 0;
        variants[i].run(variants[i].blocked ? blocked : codes);
        for (int row = 0; row < ROWS; row++) wrong += pow(out[row] - expected[row], 2), norm += pow(expected[row], 2);
        errors[i] = sqrt(wrong / norm);
        if (!(errors[i] <= variants[i].limit)) return printf("%s is wrong: %g\n", variants[i].name, errors[i]), 1;
    }
    for (int pass = 0; pass < PASSES; pass++)
        for (int i = 0; i < VARIANTS; i++) {  // in turn, so that a busy machine slows all of them
            double start = now();
            for (int matrix = 0; matrix < pool; matrix++) variants[i].run(codes + (size_t)matrix * CODES);
            seconds[i][pass] = (now() - start) / pool;
            ratios[i][pass] = seconds[0][pass] / seconds[i][pass];
        }
    for (int i = 0; i < VARIANTS; i++) {
        qsort(seconds[i], PASSES, sizeof(double), compare), qsort(ratios[i], PASSES, sizeof(double), compare);
        printf("%s  %6.2f G weights/s (best %.2f)  x %.2f (%.2f to %.2f)  error %.1e\n", variants[i].name,
               1e-9 * ROWS * COLS / seconds[i][PASSES / 2], 1e-9 * ROWS * COLS / seconds[i][0],
               ratios[i][PASSES / 2], ratios[i][0], ratios[i][PASSES - 1], errors[i]);
    }
    free(codes), free(blocked);
}

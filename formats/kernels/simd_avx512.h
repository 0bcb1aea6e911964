/* Vectors of 512 bits: AVX-512 F, BW, DQ and VL, and VNNI if MOEPACK_VNNI is defined. */

#define LANES 32        /* int16 in a vector; half as many int32 */
#define GROUP_VECTORS 4 /* vectors of weights that share the loads of codebook entries: 16 registers of them */

typedef __m512i lanes16;
typedef __m512i lanes32;

static inline lanes16 load16(const int16_t *from) { return _mm512_load_si512(from); }
static inline void store16(int16_t *to, lanes16 v) { _mm512_store_si512(to, v); }
static inline lanes16 all16(int value) { return _mm512_set1_epi16((short)value); }
static inline lanes16 add16(lanes16 a, lanes16 b) { return _mm512_add_epi16(a, b); }
static inline lanes16 add16_saturated(lanes16 a, lanes16 b) { return _mm512_adds_epi16(a, b); }
static inline lanes16 min16(lanes16 a, lanes16 b) { return _mm512_min_epi16(a, b); }

static inline uint64_t not_above64(const int16_t *values, lanes16 limit)
{
    uint64_t low = _mm512_cmple_epi16_mask(load16(values), limit);
    return low | (uint64_t)_mm512_cmple_epi16_mask(load16(values + LANES), limit) << 32;
}

static inline int least_of8(__m128i v)
{
    const __m128i flip = _mm_set1_epi16((short)0x8000); /* minpos compares without sign */
    return (int16_t)(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(v, flip)), 0) ^ 0x8000);
}

static inline int least16(lanes16 v)
{
    __m256i half = _mm256_min_epi16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    return least_of8(_mm_min_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

static inline int least64(const int16_t *values) { return least16(min16(load16(values), load16(values + LANES))); }

static inline int most64(const int16_t *values)
{
    lanes16 most = _mm512_max_epi16(load16(values), load16(values + LANES));
    return ~least16(_mm512_xor_si512(most, all16(-1))); /* ~ turns the order round without overflow */
}

static inline lanes32 load32(const int32_t *from) { return _mm512_load_si512(from); }
static inline lanes32 all32(int32_t value) { return _mm512_set1_epi32(value); }
static inline lanes32 min32(lanes32 a, lanes32 b) { return _mm512_min_epi32(a, b); }
static inline int32_t least32(lanes32 v) { return _mm512_reduce_min_epi32(v); }

static inline lanes32 dot32(lanes32 sum, lanes32 a, lanes32 b)
{
#ifdef MOEPACK_VNNI
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}

static inline lanes32 mark32(lanes32 score, lanes32 index)
{
    return _mm512_ternarylogic_epi32(score, all32(~(MAX_ENTRIES - 1)), index, 0xEA); /* (score & mask) | index */
}

static inline lanes16 narrow16(lanes32 low, lanes32 high)
{
    return _mm512_packs_epi32(_mm512_srai_epi32(low, SCORE_SHIFT), _mm512_srai_epi32(high, SCORE_SHIFT));
}

typedef __m512 floats;
#define FLOATS 16
static inline floats all_floats(float value) { return _mm512_set1_ps(value); }
static inline floats multiply_add(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline float first_float(floats v) { return _mm512_cvtss_f32(v); }

/* Sixteen lanes of float32, in which products are summed (products.md). */

#define PATH_INLINE static inline __attribute__((always_inline))
#define ROWS_TOGETHER 4 /* rows and inputs whose sums are in registers */
#define INPUTS_TOGETHER 4
#define KDA_TILE 4 /* vectors of columns whose sums are in registers */

typedef __m512 wide;
typedef __m512i wide_bytes; /* sixteen bytes, each widened to 32 bits */

PATH_INLINE wide wide_zero(void) { return _mm512_setzero_ps(); }
PATH_INLINE wide wide_all(float value) { return _mm512_set1_ps(value); }
PATH_INLINE wide wide_load(const float *from) { return _mm512_loadu_ps(from); }
PATH_INLINE void wide_store(float *to, wide v) { _mm512_storeu_ps(to, v); }
PATH_INLINE wide wide_add(wide a, wide b) { return _mm512_add_ps(a, b); }
PATH_INLINE wide wide_subtract(wide a, wide b) { return _mm512_sub_ps(a, b); }
PATH_INLINE wide wide_multiply(wide a, wide b) { return _mm512_mul_ps(a, b); }
PATH_INLINE wide wide_fma(wide a, wide b, wide c) { return _mm512_fmadd_ps(a, b, c); }

PATH_INLINE float wide_sum(wide v)
{
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

PATH_INLINE wide wide_bf16(const void *from)
{
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

PATH_INLINE wide wide_f16(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }

PATH_INLINE wide wide_int8(const void *from)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}

PATH_INLINE wide_bytes wide_bytes_load(const void *from)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}

PATH_INLINE wide_bytes wide_high(wide_bytes v) { return _mm512_srli_epi32(v, 4); }

/* The number of the low half of each byte; the permutation looks at four bits of its indices. */
PATH_INLINE wide wide_e2m1(wide_bytes v)
{
    const __m512 numbers = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                          -2.0f, -3.0f, -4.0f, -6.0f);
    return _mm512_permutexvar_ps(v, numbers);
}

PATH_INLINE wide wide_int4(wide_bytes v)
{
    const __m512 numbers = _mm512_setr_ps(-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f,
                                          3.0f, 4.0f, 5.0f, 6.0f, 7.0f);
    return _mm512_permutexvar_ps(v, numbers);
}

/* Entries of a table of 256, picked by sixteen bytes. */
PATH_INLINE wide wide_picked(const float *table, const uint8_t *codes)
{
    return _mm512_i32gather_ps(wide_bytes_load(codes), table, 4);
}

/* Four and eight inputs side by side. */
typedef __m128 four;
typedef __m256 eight;
PATH_INLINE four four_load(const float *from) { return _mm_loadu_ps(from); }
PATH_INLINE four four_add(four a, four b) { return _mm_add_ps(a, b); }
PATH_INLINE void four_store(float *to, four v) { _mm_storeu_ps(to, v); }
PATH_INLINE eight eight_load(const float *from) { return _mm256_loadu_ps(from); }
PATH_INLINE eight eight_add(eight a, eight b) { return _mm256_add_ps(a, b); }
PATH_INLINE void eight_store(float *to, eight v) { _mm256_storeu_ps(to, v); }

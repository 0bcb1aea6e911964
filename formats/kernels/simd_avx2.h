/* Vectors of 256 bits: AVX2; FMA only to measure the peak. */

#define LANES 16
#define GROUP_VECTORS 2

typedef __m256i lanes16;
typedef __m256i lanes32;

static inline lanes16 load16(const int16_t *from) { return _mm256_load_si256((const __m256i *)from); }
static inline void store16(int16_t *to, lanes16 v) { _mm256_store_si256((__m256i *)to, v); }
static inline lanes16 all16(int value) { return _mm256_set1_epi16((short)value); }
static inline lanes16 add16(lanes16 a, lanes16 b) { return _mm256_add_epi16(a, b); }
static inline lanes16 add16_saturated(lanes16 a, lanes16 b) { return _mm256_adds_epi16(a, b); }
static inline lanes16 min16(lanes16 a, lanes16 b) { return _mm256_min_epi16(a, b); }

static inline uint32_t above32(const int16_t *values, lanes16 limit)
{
    __m256i first = _mm256_cmpgt_epi16(load16(values), limit), second = _mm256_cmpgt_epi16(load16(values + LANES), limit);
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xD8); /* undo the order of packs */
    return (uint32_t)_mm256_movemask_epi8(bytes);
}

static inline uint64_t not_above64(const int16_t *values, lanes16 limit)
{
    return ~(above32(values, limit) | (uint64_t)above32(values + 2 * LANES, limit) << 32);
}

static inline int least16(lanes16 v)
{
    const __m128i flip = _mm_set1_epi16((short)0x8000); /* minpos compares without sign */
    __m128i eight = _mm_min_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return (int16_t)(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, flip)), 0) ^ 0x8000);
}

static inline int least64(const int16_t *values)
{
    lanes16 low = min16(load16(values), load16(values + LANES));
    return least16(min16(low, min16(load16(values + 2 * LANES), load16(values + 3 * LANES))));
}

static inline int most64(const int16_t *values)
{
    lanes16 low = _mm256_max_epi16(load16(values), load16(values + LANES));
    lanes16 high = _mm256_max_epi16(load16(values + 2 * LANES), load16(values + 3 * LANES));
    return ~least16(_mm256_xor_si256(_mm256_max_epi16(low, high), all16(-1))); /* ~ turns the order round */
}

static inline lanes32 load32(const int32_t *from) { return _mm256_load_si256((const __m256i *)from); }
static inline lanes32 all32(int32_t value) { return _mm256_set1_epi32(value); }
static inline lanes32 min32(lanes32 a, lanes32 b) { return _mm256_min_epi32(a, b); }

static inline int32_t least32(lanes32 v)
{
    __m128i four = _mm_min_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    __m128i two = _mm_min_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_min_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}

static inline lanes32 dot32(lanes32 sum, lanes32 a, lanes32 b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }

static inline lanes32 mark32(lanes32 score, lanes32 index)
{
    return _mm256_or_si256(_mm256_and_si256(score, all32(~(MAX_ENTRIES - 1))), index);
}

static inline lanes16 narrow16(lanes32 low, lanes32 high)
{
    return _mm256_packs_epi32(_mm256_srai_epi32(low, SCORE_SHIFT), _mm256_srai_epi32(high, SCORE_SHIFT));
}

typedef __m256 floats;
#define FLOATS 8
static inline floats all_floats(float value) { return _mm256_set1_ps(value); }
static inline floats multiply_add(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
static inline float first_float(floats v) { return _mm256_cvtss_f32(v); }

/* Sixteen lanes of float32, in which products are summed (products.md). */

#define PATH_INLINE static inline __attribute__((always_inline))
#define ROWS_TOGETHER 1 /* rows and inputs whose sums are in registers */
#define INPUTS_TOGETHER 4
#define KDA_TILE 2 /* vectors of columns whose sums are in registers */

typedef struct { __m256 low, high; } wide;
typedef struct { __m256i low, high; } wide_bytes; /* sixteen bytes, each widened to 32 bits */

PATH_INLINE wide wide_pair(__m256 low, __m256 high)
{
    wide v = {low, high};
    return v;
}

PATH_INLINE wide wide_zero(void) { return wide_pair(_mm256_setzero_ps(), _mm256_setzero_ps()); }
PATH_INLINE wide wide_all(float value) { return wide_pair(_mm256_set1_ps(value), _mm256_set1_ps(value)); }
PATH_INLINE wide wide_load(const float *from) { return wide_pair(_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)); }

PATH_INLINE void wide_store(float *to, wide v)
{
    _mm256_storeu_ps(to, v.low);
    _mm256_storeu_ps(to + 8, v.high);
}

PATH_INLINE wide wide_add(wide a, wide b)
{
    return wide_pair(_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high));
}

PATH_INLINE wide wide_subtract(wide a, wide b)
{
    return wide_pair(_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high));
}

PATH_INLINE wide wide_multiply(wide a, wide b)
{
    return wide_pair(_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high));
}

PATH_INLINE wide wide_fma(wide a, wide b, wide c)
{
    return wide_pair(_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high));
}

PATH_INLINE float wide_sum(wide v)
{
    __m256 eight = _mm256_add_ps(v.low, v.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

PATH_INLINE __m256 eight_bf16(const uint16_t *from)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
}

PATH_INLINE wide wide_bf16(const void *from)
{
    return wide_pair(eight_bf16(from), eight_bf16((const uint16_t *)from + 8));
}

PATH_INLINE wide wide_f16(const void *from)
{
    const __m128i *halves = from;
    return wide_pair(_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
}

PATH_INLINE wide wide_int8(const void *from)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return wide_pair(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                     _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))));
}

PATH_INLINE wide_bytes wide_bytes_load(const void *from)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    wide_bytes v = {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
    return v;
}

PATH_INLINE wide_bytes wide_high(wide_bytes v)
{
    wide_bytes high = {_mm256_srli_epi32(v.low, 4), _mm256_srli_epi32(v.high, 4)};
    return high;
}

/* The permutation looks at three bits of its indices; the fourth is the sign. */
PATH_INLINE __m256 eight_e2m1(__m256i v)
{
    const __m256 numbers = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_and_si256(v, _mm256_set1_epi32(8)), 28));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(numbers, v), sign);
}

/* The number of the low half of each byte. */
PATH_INLINE wide wide_e2m1(wide_bytes v) { return wide_pair(eight_e2m1(v.low), eight_e2m1(v.high)); }

PATH_INLINE __m256 eight_int4(__m256i v)
{
    __m256i half = _mm256_and_si256(v, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(half, _mm256_set1_epi32(8)));
}

PATH_INLINE wide wide_int4(wide_bytes v) { return wide_pair(eight_int4(v.low), eight_int4(v.high)); }

/* Entries of a table of 256, picked by the four bytes of a word, the lowest first. */
PATH_INLINE __m128 four_picked(const float *table, uint32_t codes)
{
    __m128 v = _mm_load_ss(table + (codes & 255));
    v = _mm_insert_ps(v, _mm_load_ss(table + (codes >> 8 & 255)), 0x10);
    v = _mm_insert_ps(v, _mm_load_ss(table + (codes >> 16 & 255)), 0x20);
    return _mm_insert_ps(v, _mm_load_ss(table + (codes >> 24)), 0x30);
}

/* Entries of a table of 256, picked by sixteen bytes. Each is loaded by itself: of a Zen 3 core gathers take 1.6 times
 * as long (benchmarks/README.md). */
PATH_INLINE wide wide_picked(const float *table, const uint8_t *codes)
{
    uint32_t four[4];
    memcpy(four, codes, sizeof four);
    return wide_pair(_mm256_set_m128(four_picked(table, four[1]), four_picked(table, four[0])),
                     _mm256_set_m128(four_picked(table, four[3]), four_picked(table, four[2])));
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

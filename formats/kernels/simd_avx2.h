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

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

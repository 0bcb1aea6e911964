/* Vectors as plain arrays: any compiler and machine, and the compiler's own vectorisation where it sees one. */

#define LANES 16
#define GROUP_VECTORS 1

typedef struct { int16_t lane[LANES]; } lanes16;
typedef struct { int32_t lane[LANES / 2]; } lanes32;

static inline lanes16 load16(const int16_t *from)
{
    lanes16 v;
    for (int l = 0; l < LANES; l++) v.lane[l] = from[l];
    return v;
}

static inline void store16(int16_t *to, lanes16 v)
{
    for (int l = 0; l < LANES; l++) to[l] = v.lane[l];
}

static inline lanes16 all16(int value)
{
    lanes16 v;
    for (int l = 0; l < LANES; l++) v.lane[l] = (int16_t)value;
    return v;
}

static inline lanes16 add16(lanes16 a, lanes16 b)
{
    for (int l = 0; l < LANES; l++) a.lane[l] = (int16_t)(uint16_t)((uint16_t)a.lane[l] + (uint16_t)b.lane[l]);
    return a;
}

static inline lanes16 add16_saturated(lanes16 a, lanes16 b)
{
    for (int l = 0; l < LANES; l++) a.lane[l] = saturated(a.lane[l] + b.lane[l]);
    return a;
}

static inline lanes16 min16(lanes16 a, lanes16 b)
{
    for (int l = 0; l < LANES; l++) a.lane[l] = a.lane[l] < b.lane[l] ? a.lane[l] : b.lane[l];
    return a;
}

static inline uint64_t not_above64(const int16_t *values, lanes16 limit)
{
    uint64_t bits = 0;
    for (int eight = 0; eight < 64; eight += 8) {
        uint64_t byte = 0; /* eight bytes of 0 or 1, whose product has them side by side at the top */
        for (int l = 0; l < 8; l++) byte |= (uint64_t)(values[eight + l] <= limit.lane[l]) << 8 * l;
        bits |= byte * UINT64_C(0x0102040810204080) >> 56 << eight;
    }
    return bits;
}

static inline int least64(const int16_t *values)
{
    int least = INT16_MAX;
    for (int l = 0; l < 64; l++) least = values[l] < least ? values[l] : least;
    return least;
}

static inline int most64(const int16_t *values)
{
    int most = INT16_MIN;
    for (int l = 0; l < 64; l++) most = values[l] > most ? values[l] : most;
    return most;
}

static inline lanes32 load32(const int32_t *from)
{
    lanes32 v;
    for (int l = 0; l < LANES / 2; l++) v.lane[l] = from[l];
    return v;
}

static inline lanes32 all32(int32_t value)
{
    lanes32 v;
    for (int l = 0; l < LANES / 2; l++) v.lane[l] = value;
    return v;
}

static inline lanes32 min32(lanes32 a, lanes32 b)
{
    for (int l = 0; l < LANES / 2; l++) a.lane[l] = a.lane[l] < b.lane[l] ? a.lane[l] : b.lane[l];
    return a;
}

static inline int32_t least32(lanes32 v)
{
    int32_t least = v.lane[0];
    for (int l = 1; l < LANES / 2; l++) least = v.lane[l] < least ? v.lane[l] : least;
    return least;
}

/* Halves of an int32 as int16: the low one first, whatever the byte order of the machine. */
static inline int32_t low_half(int32_t pair) { return (int16_t)(uint16_t)((uint32_t)pair & 0xFFFF); }
static inline int32_t high_half(int32_t pair) { return (int16_t)(uint16_t)((uint32_t)pair >> 16); }

static inline lanes32 dot32(lanes32 sum, lanes32 a, lanes32 b)
{
    for (int l = 0; l < LANES / 2; l++) {
        sum.lane[l] += low_half(a.lane[l]) * low_half(b.lane[l]) + high_half(a.lane[l]) * high_half(b.lane[l]);
    }
    return sum;
}

static inline lanes32 mark32(lanes32 score, lanes32 index)
{
    for (int l = 0; l < LANES / 2; l++) {
        score.lane[l] = (int32_t)(((uint32_t)score.lane[l] & UINT32_MAX << INDEX_BITS) | (uint32_t)index.lane[l]);
    }
    return score;
}

static inline lanes16 narrow16(lanes32 low, lanes32 high)
{
    lanes16 v;
    for (int l = 0; l < LANES / 2; l++) { /* as packs does: runs of four, from low and high in turn */
        v.lane[(l >> 2) * 8 + (l & 3)] = saturated(shifted(low.lane[l]));
        v.lane[(l >> 2) * 8 + 4 + (l & 3)] = saturated(shifted(high.lane[l]));
    }
    return v;
}

typedef float floats;
#define FLOATS 1
static inline floats all_floats(float value) { return value; }
static inline floats multiply_add(floats a, floats b, floats c) { return a * b + c; }
static inline float first_float(floats v) { return v; }

/* Sixteen lanes of float32, in which products are summed (products.md). */

#if defined(__GNUC__) || defined(__clang__)
#define PATH_INLINE static inline __attribute__((always_inline))
#else
#define PATH_INLINE static inline
#endif
#define ROWS_TOGETHER 1 /* rows and inputs whose sums are in registers */
#define INPUTS_TOGETHER 4
#define KDA_TILE 1 /* vectors of columns whose sums are in registers */
#define WIDE_LANES for (int l = 0; l < 16; l++)

typedef struct { float lane[16]; } wide;
typedef struct { uint8_t lane[16]; } wide_bytes;

PATH_INLINE wide wide_all(float value)
{
    wide v;
    WIDE_LANES v.lane[l] = value;
    return v;
}

PATH_INLINE wide wide_zero(void) { return wide_all(0.0f); }

PATH_INLINE wide wide_load(const float *from)
{
    wide v;
    memcpy(v.lane, from, sizeof v.lane);
    return v;
}

PATH_INLINE void wide_store(float *to, wide v) { memcpy(to, v.lane, sizeof v.lane); }

PATH_INLINE wide wide_add(wide a, wide b)
{
    WIDE_LANES a.lane[l] += b.lane[l];
    return a;
}

PATH_INLINE wide wide_subtract(wide a, wide b)
{
    WIDE_LANES a.lane[l] -= b.lane[l];
    return a;
}

PATH_INLINE wide wide_multiply(wide a, wide b)
{
    WIDE_LANES a.lane[l] *= b.lane[l];
    return a;
}

PATH_INLINE wide wide_fma(wide a, wide b, wide c)
{
    WIDE_LANES c.lane[l] = fmaf(a.lane[l], b.lane[l], c.lane[l]);
    return c;
}

PATH_INLINE float wide_sum(wide v)
{
    for (int step = 8; step; step /= 2) {
        for (int l = 0; l < step; l++) v.lane[l] += v.lane[l + step];
    }
    return v.lane[0];
}

PATH_INLINE wide wide_bf16(const void *from)
{
    wide v;
    uint16_t bits[16];
    memcpy(bits, from, sizeof bits);
    WIDE_LANES
    {
        uint32_t word = (uint32_t)bits[l] << 16;
        memcpy(&v.lane[l], &word, sizeof word);
    }
    return v;
}

static void PATH(half_to_single)(const uint16_t *from, int64_t count, float *to); /* of convert.h */

PATH_INLINE wide wide_f16(const void *from)
{
    wide v;
    uint16_t bits[16];
    memcpy(bits, from, sizeof bits);
    PATH(half_to_single)(bits, 16, v.lane);
    return v;
}

PATH_INLINE wide wide_int8(const void *from)
{
    wide v;
    int8_t codes[16];
    memcpy(codes, from, sizeof codes);
    WIDE_LANES v.lane[l] = (float)codes[l];
    return v;
}

PATH_INLINE wide_bytes wide_bytes_load(const void *from)
{
    wide_bytes v;
    memcpy(v.lane, from, sizeof v.lane);
    return v;
}

PATH_INLINE wide_bytes wide_high(wide_bytes v)
{
    WIDE_LANES v.lane[l] >>= 4;
    return v;
}

/* The number of the low half of each byte. */
PATH_INLINE wide wide_e2m1(wide_bytes v)
{
    static const float numbers[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    wide found;
    WIDE_LANES found.lane[l] = numbers[v.lane[l] & 15];
    return found;
}

PATH_INLINE wide wide_int4(wide_bytes v)
{
    wide found;
    WIDE_LANES found.lane[l] = (float)((v.lane[l] & 15) - 8);
    return found;
}

/* Entries of a table of 256, picked by sixteen bytes. */
PATH_INLINE wide wide_picked(const float *table, const uint8_t *codes)
{
    wide v;
    WIDE_LANES v.lane[l] = table[codes[l]];
    return v;
}

/* Four and eight inputs side by side. */
typedef struct { float lane[4]; } four;
typedef struct { float lane[8]; } eight;

PATH_INLINE four four_load(const float *from)
{
    four v;
    memcpy(v.lane, from, sizeof v.lane);
    return v;
}

PATH_INLINE four four_add(four a, four b)
{
    for (int l = 0; l < 4; l++) a.lane[l] += b.lane[l];
    return a;
}

PATH_INLINE void four_store(float *to, four v) { memcpy(to, v.lane, sizeof v.lane); }

PATH_INLINE eight eight_load(const float *from)
{
    eight v;
    memcpy(v.lane, from, sizeof v.lane);
    return v;
}

PATH_INLINE eight eight_add(eight a, eight b)
{
    for (int l = 0; l < 8; l++) a.lane[l] += b.lane[l];
    return a;
}

PATH_INLINE void eight_store(float *to, eight v) { memcpy(to, v.lane, sizeof v.lane); }

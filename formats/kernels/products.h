/* Products of encoded rows with inputs, one lane sum a row and input; products.md has the order of each sum.
 *
 * Tiles of a few rows and inputs have their sums in registers, and what is unpacked serves all inputs of the
 * tile. Columns are filled up with zeros: inputs when a call begins, weights in a buffer at the end of a row. */

#if defined(__GNUC__) || defined(__clang__)
#define FETCH(place) __builtin_prefetch(place, 0, 2) /* into the second cache */
#else
#define FETCH(place) ((void)(place))
#endif

#define LINE_BYTES 64
#define WIDE 16
#define MOST_ROWS 4 /* of a tile with one input; with several it has ROWS_TOGETHER and INPUTS_TOGETHER */
#define PART 32     /* inputs that are multiplied in one pass over the weights: few enough for the second cache */
#define MXFP4_GROUP 32
#define MAX_GROUP 1024

/* Some inputs float32 [count][stride], zero from `cols` on, on lines of 64 bytes; `owned` is what to free. */
struct filled {
    void *owned;
    float *x;
    int64_t stride;
};

/* `bytes` of memory on a line of 64, in *owned if there is enough. */
static void *lines(int64_t bytes, void **owned)
{
    *owned = malloc((size_t)bytes + 64);
    return *owned ? (char *)*owned + (64 - (uintptr_t)*owned % 64) : NULL;
}

/* Room for as many inputs as a part of the product has; no x if memory is short. */
static struct filled room_for(const struct product *p, int64_t unit)
{
    struct filled f = {NULL, NULL, (p->cols + unit - 1) / unit * unit};
    f.x = lines((p->count < PART ? p->count : PART) * f.stride * (int64_t)sizeof(float), &f.owned);
    return f;
}

/* The part of a product with the inputs from t on, filled into f. */
static struct product part_from(const struct product *p, int64_t t, struct filled *f)
{
    struct product part = *p;
    part.inputs += t * p->cols;
    part.out += t * p->width;
    part.count = p->count - t < PART ? p->count - t : PART;
    for (int64_t k = 0; k < part.count; k++) {
        memcpy(f->x + k * f->stride, part.inputs + k * p->cols, (size_t)p->cols * sizeof(float));
        memset(f->x + k * f->stride + p->cols, 0, (size_t)(f->stride - p->cols) * sizeof(float));
    }
    return part;
}

/* Where the result of a row and an input goes. */
PATH_INLINE float *result(const struct product *p, int64_t row, int64_t t)
{
    return p->out + t * p->width + p->at + row - p->first;
}

/* Calls tile(row, t, rows, inputs), the last two known to the compiler, for all rows and inputs. */
#define FOR_TILES(p, tile)                                                          \
    const int64_t high = (p)->count > 1 ? ROWS_TOGETHER : MOST_ROWS;                \
    for (int64_t row = (p)->first, rows; row < (p)->stop; row += rows) {            \
        rows = (p)->stop - row >= high ? high : 1;                                  \
        for (int64_t t = 0, inputs; t < (p)->count; t += inputs) {                  \
            const int64_t left = rows == high ? (p)->count - t : 1;                 \
            inputs = left >= INPUTS_TOGETHER ? INPUTS_TOGETHER : left >= 2 ? 2 : 1; \
            if (inputs == INPUTS_TOGETHER) {                                        \
                tile(row, t, ROWS_TOGETHER, INPUTS_TOGETHER);                       \
            } else if (inputs == 2) {                                               \
                tile(row, t, ROWS_TOGETHER, 2);                                     \
            } else if (rows == MOST_ROWS) {                                         \
                tile(row, t, MOST_ROWS, 1);                                         \
            } else {                                                                \
                tile(row, t, 1, 1);                                                 \
            }                                                                       \
        }                                                                           \
    }

/* How far the next tile of rows lies ahead, of which each tile fetches the lines; 0 if there is none. */
PATH_INLINE int64_t next_tile(const struct product *p, int64_t row, int rows, int64_t stride)
{
    return row + 2 * rows <= p->stop ? rows * stride : 0;
}

#define TILE_ROWS_AND_INPUTS       \
    for (int r = 0; r < rows; r++) \
        for (int j = 0; j < inputs; j++)

/* Plain weights. */

PATH_INLINE wide raw_weights(const uint8_t *from, const int kind)
{
    return kind == RAW_F32 ? wide_load((const float *)(const void *)from)
           : kind == RAW_BF16 ? wide_bf16(from)
                              : wide_f16(from);
}

PATH_INLINE void raw_tile(const struct product *p, const uint8_t *values, const int kind, const struct filled *f,
                          int64_t row, int64_t t, const int rows, const int inputs)
{
    const int64_t size = kind == RAW_F32 ? 4 : 2, whole = p->cols / WIDE * WIDE;
    const uint8_t *w = values + row * p->cols * size;
    const float *x = f->x + t * f->stride;
    wide acc[MOST_ROWS][INPUTS_TOGETHER];
    TILE_ROWS_AND_INPUTS acc[r][j] = wide_zero();
    const int64_t ahead = next_tile(p, row, rows, p->cols * size);
    for (int64_t c = 0; c < whole; c += WIDE) {
        for (int r = 0; r < rows; r++) {
            const uint8_t *from = w + (r * p->cols + c) * size;
            wide weights = raw_weights(from, kind);
            if (t == 0 && c * size % LINE_BYTES == 0) FETCH(from + ahead);
            for (int j = 0; j < inputs; j++) {
                acc[r][j] = wide_fma(weights, wide_load(x + j * f->stride + c), acc[r][j]);
            }
        }
    }
    if (whole < p->cols) {
        for (int r = 0; r < rows; r++) {
            uint8_t rest[WIDE * 4] = {0};
            memcpy(rest, w + (r * p->cols + whole) * size, (size_t)((p->cols - whole) * size));
            wide weights = raw_weights(rest, kind);
            for (int j = 0; j < inputs; j++) {
                acc[r][j] = wide_fma(weights, wide_load(x + j * f->stride + whole), acc[r][j]);
            }
        }
    }
    TILE_ROWS_AND_INPUTS *result(p, row + r, t + j) = wide_sum(acc[r][j]);
}

static int PATH(multiply_raw)(const struct product *p, const uint8_t *values, int kind)
{
    struct filled f = room_for(p, WIDE);
    if (!f.x) return 0;
#define RAW_F32_TILE(row, t, rows, inputs) raw_tile(&part, values, RAW_F32, &f, row, t, rows, inputs)
#define RAW_BF16_TILE(row, t, rows, inputs) raw_tile(&part, values, RAW_BF16, &f, row, t, rows, inputs)
#define RAW_F16_TILE(row, t, rows, inputs) raw_tile(&part, values, RAW_F16, &f, row, t, rows, inputs)
    for (int64_t first = 0; first < p->count; first += PART) {
        const struct product part = part_from(p, first, &f);
        if (kind == RAW_F32) {
            FOR_TILES(&part, RAW_F32_TILE)
        } else if (kind == RAW_BF16) {
            FOR_TILES(&part, RAW_BF16_TILE)
        } else {
            FOR_TILES(&part, RAW_F16_TILE)
        }
    }
    free(f.owned);
    return 1;
}

/* MXFP4: inputs of a group of 32 columns stand as the 16 even ones and the 16 odd ones. */

static void split(const struct filled *f, int64_t count)
{
    for (float *x = f->x; x < f->x + count * f->stride; x += MXFP4_GROUP) {
        float odd[WIDE];
        for (int l = 0; l < WIDE; l++) odd[l] = x[2 * l + 1];
        for (int l = 0; l < WIDE; l++) x[l] = x[2 * l];
        memcpy(x + WIDE, odd, sizeof odd);
    }
}

struct mxfp4 {
    const uint8_t *codes, *scales;
    float factors[256]; /* what a byte of scales means */
};

PATH_INLINE wide mxfp4_step(wide_bytes codes, const float *x, wide factor, wide acc)
{
    wide sum = wide_multiply(wide_e2m1(codes), wide_load(x));
    sum = wide_fma(wide_e2m1(wide_high(codes)), wide_load(x + WIDE), sum);
    return wide_fma(sum, factor, acc);
}

PATH_INLINE void mxfp4_tile(const struct product *p, const struct mxfp4 *m, const struct filled *f, int64_t row,
                            int64_t t, const int rows, const int inputs)
{
    const int64_t stride = (p->cols + 1) / 2, groups = (p->cols + MXFP4_GROUP - 1) / MXFP4_GROUP;
    const int64_t whole = p->cols / MXFP4_GROUP;
    const uint8_t *codes = m->codes + row * stride, *scales = m->scales + row * groups;
    const float *x = f->x + t * f->stride;
    wide acc[MOST_ROWS][INPUTS_TOGETHER];
    TILE_ROWS_AND_INPUTS acc[r][j] = wide_zero();
    const int64_t ahead = next_tile(p, row, rows, stride);
    for (int64_t g = 0; g < whole; g++) {
        for (int r = 0; r < rows; r++) {
            const uint8_t *from = codes + r * stride + g * WIDE;
            wide_bytes bytes = wide_bytes_load(from);
            if (t == 0 && g * WIDE % LINE_BYTES == 0) FETCH(from + ahead);
            wide factor = wide_all(m->factors[scales[r * groups + g]]);
            for (int j = 0; j < inputs; j++) {
                acc[r][j] = mxfp4_step(bytes, x + j * f->stride + g * MXFP4_GROUP, factor, acc[r][j]);
            }
        }
    }
    if (whole < groups) {
        for (int r = 0; r < rows; r++) {
            uint8_t rest[WIDE] = {0};
            memcpy(rest, codes + r * stride + whole * WIDE, (size_t)(stride - whole * WIDE));
            if (p->cols % 2) rest[stride - whole * WIDE - 1] &= 15; /* the high half has no column */
            wide_bytes bytes = wide_bytes_load(rest);
            wide factor = wide_all(m->factors[scales[r * groups + whole]]);
            for (int j = 0; j < inputs; j++) {
                acc[r][j] = mxfp4_step(bytes, x + j * f->stride + whole * MXFP4_GROUP, factor, acc[r][j]);
            }
        }
    }
    TILE_ROWS_AND_INPUTS *result(p, row + r, t + j) = wide_sum(acc[r][j]);
}

static int PATH(multiply_mxfp4)(const struct product *p, const uint8_t *codes, const uint8_t *scales, int bias)
{
    struct mxfp4 m = {codes, scales, {0}};
    struct filled f = room_for(p, MXFP4_GROUP);
    if (!f.x) return 0;
    for (int b = 0; b < 256; b++) m.factors[b] = ldexpf(1.0f, b - bias);
#define MXFP4_TILE(row, t, rows, inputs) mxfp4_tile(&part, &m, &f, row, t, rows, inputs)
    for (int64_t first = 0; first < p->count; first += PART) {
        const struct product part = part_from(p, first, &f);
        split(&f, part.count);
        FOR_TILES(&part, MXFP4_TILE)
    }
    free(f.owned);
    return 1;
}

/* Integers with a scale a group. */

struct group_int {
    const uint8_t *codes;
    const uint16_t *scales;
    int64_t group, stride, groups; /* columns a group, bytes and groups a row */
    float unit;                    /* 2**exponent */
};

static struct group_int group_int(const uint8_t *codes, const uint16_t *scales, int64_t cols, int bits, int64_t group,
                                  int exponent)
{
    struct group_int m = {codes,
                          scales,
                          group,
                          bits == 8 ? cols : (cols + 1) / 2,
                          (cols + group - 1) / group,
                          ldexpf(1.0f, exponent)};
    return m;
}

/* The factor of a group: float32(scale) x 2**exponent. */
PATH_INLINE float group_factor(const struct group_int *m, int64_t row, int64_t g)
{
    float scale;
    PATH(half_to_single)(m->scales + row * m->groups + g, 1, &scale);
    return scale * m->unit;
}

/* The integers of a short group of `width` columns, filled up with zeros to whole lanes. */
static void short_group(const uint8_t *from, int64_t width, const int bits, float *to)
{
    int64_t half = (width + 1) / 2;
    for (int64_t k = 0; k < width; k++) {
        to[k] = (float)(bits == 8 ? (int8_t)from[k] : k < half ? (from[k] & 15) - 8 : (from[k - half] >> 4) - 8);
    }
    for (int64_t k = width; k % WIDE; k++) to[k] = 0.0f;
}

PATH_INLINE void group_int_tile(const struct product *p, const struct group_int *m, const int bits,
                                const struct filled *f, int64_t row, int64_t t, const int rows, const int inputs)
{
    const int64_t whole = p->cols / m->group, bytes = bits == 8 ? m->group : m->group / 2;
    const uint8_t *codes = m->codes + row * m->stride;
    const float *x = f->x + t * f->stride;
    wide acc[MOST_ROWS][INPUTS_TOGETHER], sum[MOST_ROWS][INPUTS_TOGETHER];
    const int64_t ahead = next_tile(p, row, rows, m->stride);
    TILE_ROWS_AND_INPUTS acc[r][j] = wide_zero();
    for (int64_t g = 0; g < whole; g++) {
        const float *columns = x + g * m->group;
        TILE_ROWS_AND_INPUTS sum[r][j] = wide_zero();
        for (int64_t k = 0; k < bytes; k += WIDE) { /* all bytes, or all low halves */
            for (int r = 0; r < rows; r++) {
                const uint8_t *from = codes + r * m->stride + g * bytes + k;
                if (t == 0 && k % LINE_BYTES == 0) FETCH(from + ahead);
                wide q = bits == 8 ? wide_int8(from) : wide_int4(wide_bytes_load(from));
                for (int j = 0; j < inputs; j++) {
                    sum[r][j] = wide_fma(q, wide_load(columns + j * f->stride + k), sum[r][j]);
                }
            }
        }
        for (int64_t k = 0; bits == 4 && k < bytes; k += WIDE) {
            for (int r = 0; r < rows; r++) {
                wide q = wide_int4(wide_high(wide_bytes_load(codes + r * m->stride + g * bytes + k)));
                for (int j = 0; j < inputs; j++) {
                    sum[r][j] = wide_fma(q, wide_load(columns + j * f->stride + bytes + k), sum[r][j]);
                }
            }
        }
        for (int r = 0; r < rows; r++) {
            wide factor = wide_all(group_factor(m, row + r, g));
            for (int j = 0; j < inputs; j++) acc[r][j] = wide_fma(sum[r][j], factor, acc[r][j]);
        }
    }
    if (whole < m->groups) {
        const float *columns = x + whole * m->group;
        for (int r = 0; r < rows; r++) {
            float rest[MAX_GROUP];
            short_group(codes + r * m->stride + whole * bytes, p->cols - whole * m->group, bits, rest);
            for (int j = 0; j < inputs; j++) {
                sum[r][j] = wide_zero();
                for (int64_t k = 0; k < p->cols - whole * m->group; k += WIDE) {
                    sum[r][j] = wide_fma(wide_load(rest + k), wide_load(columns + j * f->stride + k), sum[r][j]);
                }
                acc[r][j] = wide_fma(sum[r][j], wide_all(group_factor(m, row + r, whole)), acc[r][j]);
            }
        }
    }
    TILE_ROWS_AND_INPUTS *result(p, row + r, t + j) = wide_sum(acc[r][j]);
}

static int PATH(multiply_group_int)(const struct product *p, const uint8_t *codes, const uint16_t *scales, int bits,
                                    int64_t group, int exponent)
{
    struct group_int m = group_int(codes, scales, p->cols, bits, group, exponent);
    struct filled f = room_for(p, WIDE);
    if (!f.x) return 0;
#define GROUP_8_TILE(row, t, rows, inputs) group_int_tile(&part, &m, 8, &f, row, t, rows, inputs)
#define GROUP_4_TILE(row, t, rows, inputs) group_int_tile(&part, &m, 4, &f, row, t, rows, inputs)
    for (int64_t first = 0; first < p->count; first += PART) {
        const struct product part = part_from(p, first, &f);
        if (bits == 8) {
            FOR_TILES(&part, GROUP_8_TILE)
        } else {
            FOR_TILES(&part, GROUP_4_TILE)
        }
    }
    free(f.owned);
    return 1;
}

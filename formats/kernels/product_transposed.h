/* Transposed products: sums over rows, each column a chain of fused multiply-adds (products.md).
 *
 * Columns are taken in runs that stay in the first cache with their weights as float32; four rows at a time join the
 * sums, which stand in the output. Of many inputs some at a time are taken, each with a pass over the weights. */

#define RUN_COLUMNS 1024
#define PART_SUMS 16 /* inputs whose sums are worked on in one pass over the weights */

/* Adds up to four rows of weights float32 [rows][RUN_COLUMNS] to the sums of `width` columns of every input. */
static void add_rows(const struct transposed *p, const float *weights, int64_t row, const int rows, int64_t left,
                     int64_t width)
{
    for (int64_t t = 0; t < p->count; t++) {
        const float *x = p->inputs + t * (p->row_stop - p->row_first) + row - p->row_first;
        float *sums = p->out + t * p->width + p->at + left - p->first;
        int64_t c = 0;
        for (; c + WIDE <= width; c += WIDE) {
            wide sum = wide_load(sums + c);
            for (int r = 0; r < rows; r++) {
                sum = wide_fma(wide_all(x[r]), wide_load(weights + r * RUN_COLUMNS + c), sum);
            }
            wide_store(sums + c, sum);
        }
        for (; c < width; c++) {
            for (int r = 0; r < rows; r++) sums[c] = fmaf(x[r], weights[r * RUN_COLUMNS + c], sums[c]);
        }
    }
}

/* The part of a product with the inputs from t on, its sums at zero. */
static struct transposed cleared_part(const struct transposed *p, int64_t t)
{
    struct transposed part = *p;
    part.inputs += t * (p->row_stop - p->row_first);
    part.out += t * p->width;
    part.count = p->count - t < PART_SUMS ? p->count - t : PART_SUMS;
    for (int64_t k = 0; k < part.count; k++) {
        memset(part.out + k * p->width + p->at, 0, (size_t)(p->stop - p->first) * sizeof(float));
    }
    return part;
}

/* Fetches about what columns left to left + width of a row take, where rows have `stride` bytes. */
static void fetch_run(const struct transposed *p, const uint8_t *codes, int64_t stride, int64_t row, int64_t left,
                      int64_t width)
{
    const uint8_t *from = codes + row * stride + left * stride / p->cols;
    for (int64_t at = 0; at < width * stride / p->cols; at += LINE_BYTES) FETCH(from + at);
}

/* Calls decode(row, left, width, to) for all rows and runs of columns; runs start at multiples of `unit`. While some
 * rows are worked on, the next ones are fetched. */
#define FOR_RUNS(p, unit, codes, stride, decode)                                                          \
    for (int64_t left = (p)->first, width; left < (p)->stop; left += width) {                             \
        const int64_t end = (left / (unit) + 1) * (unit);                                                 \
        width = (end < (p)->stop ? end : (p)->stop) - left;                                               \
        for (int64_t row = (p)->row_first, rows; row < (p)->row_stop; row += rows) {                      \
            float weights[MOST_ROWS * RUN_COLUMNS];                                                       \
            rows = (p)->row_stop - row >= MOST_ROWS ? MOST_ROWS : 1;                                      \
            for (int64_t r = row; r < row + rows; r++) {                                                  \
                if (r + rows < (p)->row_stop) fetch_run(p, codes, stride, r + rows, left, width);         \
                decode(r, left, width, weights + (r - row) * RUN_COLUMNS);                                \
            }                                                                                             \
            if (rows == MOST_ROWS) {                                                                      \
                add_rows(p, weights, row, MOST_ROWS, left, width);                                        \
            } else {                                                                                      \
                add_rows(p, weights, row, 1, left, width);                                                \
            }                                                                                             \
        }                                                                                                 \
    }

static void PATH(transposed_raw)(const struct transposed *p, const uint8_t *values, int kind)
{
    const int64_t size = kind == RAW_F32 ? 4 : 2;
#define RAW_FROM(row, left) (values + ((row) * p->cols + (left)) * size)
#define HALVES_FROM(row, left) ((const uint16_t *)(const void *)RAW_FROM(row, left))
#define F32_RUN(row, left, width, to) memcpy(to, RAW_FROM(row, left), (size_t)(width) * sizeof(float))
#define BF16_RUN(row, left, width, to) PATH(bfloat16_to_single)(HALVES_FROM(row, left), width, to)
#define F16_RUN(row, left, width, to) PATH(half_to_single)(HALVES_FROM(row, left), width, to)
    for (int64_t t = 0; t < p->count; t += PART_SUMS) {
        const struct transposed part = cleared_part(p, t);
        if (kind == RAW_F32) {
            FOR_RUNS(&part, RUN_COLUMNS, values, p->cols * size, F32_RUN)
        } else if (kind == RAW_BF16) {
            FOR_RUNS(&part, RUN_COLUMNS, values, p->cols * size, BF16_RUN)
        } else {
            FOR_RUNS(&part, RUN_COLUMNS, values, p->cols * size, F16_RUN)
        }
    }
}

/* Columns left to left + width of a row, which lie within one group, as the codec decodes them. */
static void decode_group(const struct group_int *m, int bits, int64_t cols, int64_t row, int64_t left, int64_t width,
                         float *to)
{
    const int64_t g = left / m->group, start = g * m->group;
    const int64_t columns = cols - start < m->group ? cols - start : m->group, half = (columns + 1) / 2;
    const float factor = group_factor(m, row, g);
    const uint8_t *from = m->codes + row * m->stride + (bits == 8 ? start : start / 2);
    int64_t k = left - start, end = k + width;
    if (bits == 8) {
        for (; k < end; k++) *to++ = (float)(int8_t)from[k] * factor;
    } else {
        for (; k < end && k < half; k++) *to++ = (float)((from[k] & 15) - 8) * factor;
        for (; k < end; k++) *to++ = (float)((from[k - half] >> 4) - 8) * factor;
    }
}

static void PATH(transposed_group_int)(const struct transposed *p, const uint8_t *codes, const uint16_t *scales,
                                       int bits, int64_t group, int exponent)
{
    struct group_int m = group_int(codes, scales, p->cols, bits, group, exponent);
#define GROUP_RUN(row, left, width, to) decode_group(&m, bits, p->cols, row, left, width, to)
    for (int64_t t = 0; t < p->count; t += PART_SUMS) {
        const struct transposed part = cleared_part(p, t);
        FOR_RUNS(&part, group, codes, m.stride, GROUP_RUN)
    }
}

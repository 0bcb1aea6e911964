/* Products with residual-quantised rows: tables of the products of codebook entries and inputs, and sums of what the
 * indices pick from them (products.md).
 *
 * One input: tables of eight vectors, 24 KB at three stages of 256 entries, stay in the first cache while sixteen rows
 * at a time gather from them. Several: an entry's products with 4, 8 or 16 inputs stand side by side, and one load
 * picks them all. */

#define TABLE_VECTORS 8          /* vectors whose tables are there together, for one input */
#define MAX_TOGETHER 16  /* inputs whose products stand side by side */

/* Bytes that a product works in, beside the sums of rows. */
struct rvq_work {
    _Alignas(64) float books[MAX_STAGES][DIMENSION][MAX_ENTRIES]; /* transposed codebooks, zero past the entries */
    _Alignas(64) float tables[MAX_STAGES * MAX_ENTRIES * MAX_TOGETHER]; /* as a table_... function says */
    int stages;
};

static void fill_books(struct rvq_work *work, const uint16_t *codebooks, int stages, int entries)
{
    memset(work->books, 0, sizeof work->books);
    work->stages = stages;
    for (int stage = 0; stage < stages; stage++) {
        for (int e = 0; e < entries; e++, codebooks += DIMENSION) {
            float entry[DIMENSION];
            PATH(half_to_single)(codebooks, DIMENSION, entry);
            for (int d = 0; d < DIMENSION; d++) work->books[stage][d][e] = entry[d];
        }
    }
}

/* Tables [vector][stage][entry] of `vectors` vectors of one input, x [vectors][8]. */
static void fill_tables_of_one(struct rvq_work *work, const float *x, int vectors)
{
    for (int stage = 0; stage < work->stages; stage++) {
        for (int e = 0; e < MAX_ENTRIES; e += WIDE) {
            wide c[DIMENSION];
            for (int d = 0; d < DIMENSION; d++) c[d] = wide_load(work->books[stage][d] + e);
            for (int v = 0; v < vectors; v++) {
                wide sum = wide_multiply(c[0], wide_all(x[v * DIMENSION]));
                for (int d = 1; d < DIMENSION; d++) sum = wide_fma(c[d], wide_all(x[v * DIMENSION + d]), sum);
                wide_store(work->tables + (v * work->stages + stage) * MAX_ENTRIES + e, sum);
            }
        }
    }
}

/* Sums of sixteen rows, `codes` at their first line of a batch. */
PATH_INLINE void gather_rows(const struct rvq_work *work, const uint8_t *codes, int vectors, const int stages,
                             float *sums)
{
    wide acc = wide_load(sums);
    const float *table = work->tables;
    for (int v = 0; v < vectors; v++) {
        wide sum = wide_picked(table, codes);
        for (int stage = 1; stage < stages; stage++) {
            sum = wide_add(sum, wide_picked(table + stage * MAX_ENTRIES, codes + stage * BLOCK_ROWS));
        }
        acc = wide_add(acc, sum);
        table += stages * MAX_ENTRIES;
        codes += stages * BLOCK_ROWS;
    }
    wide_store(sums, acc);
}

/* Adds a batch to the sums of rows top to stop, of which top is a multiple of 16. */
static void gather(const struct rvq_work *work, const uint8_t *codes, int64_t all, int64_t v, int vectors,
                   int64_t top, int64_t stop, float *sums)
{
    const int stages = work->stages;
    for (int64_t row = top; row < stop; row += WIDE, sums += WIDE) {
        const uint8_t *from = codes + (row / BLOCK_ROWS * all + v) * stages * BLOCK_ROWS + row % BLOCK_ROWS;
        switch (stages) {
        case 1: gather_rows(work, from, vectors, 1, sums); break;
        case 2: gather_rows(work, from, vectors, 2, sums); break;
        case 3: gather_rows(work, from, vectors, 3, sums); break;
        default: gather_rows(work, from, vectors, 4, sums);
        }
    }
}

/* Table [stage][entry][input] of one vector; x [8][together]. */
PATH_INLINE void fill_tables_of_some(struct rvq_work *work, const float *x, const int together)
{
    for (int stage = 0; stage < work->stages; stage++) {
        for (int e = 0; e < MAX_ENTRIES; e++) {
            float sum[MAX_TOGETHER];
            for (int j = 0; j < together; j++) sum[j] = work->books[stage][0][e] * x[j];
            for (int d = 1; d < DIMENSION; d++) {
                float c = work->books[stage][d][e];
                for (int j = 0; j < together; j++) sum[j] = fmaf(c, x[d * together + j], sum[j]);
            }
            memcpy(work->tables + (stage * MAX_ENTRIES + e) * together, sum, (size_t)together * sizeof(float));
        }
    }
}

/* Adds one vector to the sums [row][input] of rows top to stop. */
PATH_INLINE void pick(const struct rvq_work *work, const uint8_t *codes, int64_t all, int64_t v, int64_t top,
                      int64_t stop, const int stages, const int together, float *sums)
{
    for (int64_t row = top; row < stop; row++, sums += together) {
        const uint8_t *from = codes + (row / BLOCK_ROWS * all + v) * stages * BLOCK_ROWS + row % BLOCK_ROWS;
        float sum[MAX_TOGETHER];
        const float *entry = work->tables + from[0] * together;
        for (int j = 0; j < together; j++) sum[j] = entry[j];
        for (int stage = 1; stage < stages; stage++) {
            entry = work->tables + (stage * MAX_ENTRIES + from[stage * BLOCK_ROWS]) * together;
            for (int j = 0; j < together; j++) sum[j] += entry[j];
        }
        for (int j = 0; j < together; j++) sums[j] += sum[j];
    }
}

PATH_INLINE void pick_stages(const struct rvq_work *work, const uint8_t *codes, int64_t all, int64_t v, int64_t top,
                             int64_t stop, const int together, float *sums)
{
    switch (work->stages) {
    case 1: pick(work, codes, all, v, top, stop, 1, together, sums); break;
    case 2: pick(work, codes, all, v, top, stop, 2, together, sums); break;
    case 3: pick(work, codes, all, v, top, stop, 3, together, sums); break;
    default: pick(work, codes, all, v, top, stop, 4, together, sums);
    }
}

/* Inputs t to t + used of a product, side by side in `together` places. */
PATH_INLINE void multiply_some(const struct product *p, const struct rvq_matrix *matrices, int count,
                               struct rvq_work *work, int64_t t, int64_t used, const int together, float *sums)
{
    const int64_t all = (p->cols + DIMENSION - 1) / DIMENSION, rows = p->stop - p->first;
    for (int64_t v = 0; v < all; v++) {
        float x[DIMENSION * MAX_TOGETHER] = {0};
        int64_t width = p->cols - v * DIMENSION < DIMENSION ? p->cols - v * DIMENSION : DIMENSION;
        for (int64_t j = 0; j < used; j++) {
            const float *from = p->inputs + (t + j) * p->cols + v * DIMENSION;
            for (int64_t d = 0; d < width; d++) x[d * together + j] = from[d];
        }
        fill_tables_of_some(work, x, together);
        for (int k = 0; k < count; k++) {
            pick_stages(work, matrices[k].codes, all, v, p->first, p->stop, together, sums + k * rows * together);
        }
    }
}

static void multiply_one(const struct product *p, const struct rvq_matrix *matrices, int count, struct rvq_work *work,
                         int64_t t, float *sums)
{
    const int64_t all = (p->cols + DIMENSION - 1) / DIMENSION, top = p->first / WIDE * WIDE;
    const int64_t rows = (p->stop - top + WIDE - 1) / WIDE * WIDE;
    const float *input = p->inputs + t * p->cols;
    for (int64_t v = 0; v < all; v += TABLE_VECTORS) {
        float x[TABLE_VECTORS * DIMENSION] = {0};
        int64_t vectors = all - v < TABLE_VECTORS ? all - v : TABLE_VECTORS, left = v * DIMENSION;
        int64_t width = p->cols - left < TABLE_VECTORS * DIMENSION ? p->cols - left : TABLE_VECTORS * DIMENSION;
        memcpy(x, input + left, (size_t)width * sizeof(float));
        fill_tables_of_one(work, x, (int)vectors);
        for (int k = 0; k < count; k++) {
            gather(work, matrices[k].codes, all, v, (int)vectors, top, p->stop, sums + k * rows);
        }
    }
}

/* Sums times the scales of their rows. Sums [matrix][row + skip][input], of which each matrix has `rows`. */
static void scale_rows(const struct product *p, const struct rvq_matrix *matrices, int count, int64_t t, int64_t used,
                       int64_t together, int64_t skip, int64_t rows, const float *sums)
{
    for (int k = 0; k < count; k++) {
        const float unit = ldexpf(1.0f, matrices[k].exponent);
        const float *from = sums + (k * rows + skip) * together;
        for (int64_t row = p->first; row < p->stop; row++, from += together) {
            float scale;
            PATH(half_to_single)(matrices[k].scales + row, 1, &scale);
            for (int64_t j = 0; j < used; j++) {
                matrices[k].out[(t + j) * p->width + p->at + row - p->first] = from[j] * (scale * unit);
            }
        }
    }
}

static int PATH(multiply_rvq)(const struct product *p, const struct rvq_matrix *matrices, int count,
                              const uint16_t *codebooks, int stages, int entries)
{
    const int64_t skip = p->first % WIDE, rows = p->stop - p->first;
    const int64_t wide_rows = (skip + rows + WIDE - 1) / WIDE * WIDE;
    const int64_t sums_bytes = count * wide_rows * (p->count > 1 ? MAX_TOGETHER : 1) * (int64_t)sizeof(float);
    void *owned;
    struct rvq_work *work = lines((int64_t)sizeof *work + sums_bytes, &owned);
    if (!work) return 0;
    float *sums = (float *)(work + 1);
    fill_books(work, codebooks, stages, entries);
    for (int64_t t = 0, used; t < p->count; t += used) {
        int64_t left = p->count - t;
        used = left < MAX_TOGETHER ? left : MAX_TOGETHER;
        memset(sums, 0, (size_t)sums_bytes);
        if (used == 1) {
            multiply_one(p, matrices, count, work, t, sums);
            scale_rows(p, matrices, count, t, 1, 1, skip, wide_rows, sums);
        } else if (used <= 4) {
            multiply_some(p, matrices, count, work, t, used, 4, sums);
            scale_rows(p, matrices, count, t, used, 4, 0, rows, sums);
        } else if (used <= 8) {
            multiply_some(p, matrices, count, work, t, used, 8, sums);
            scale_rows(p, matrices, count, t, used, 8, 0, rows, sums);
        } else {
            multiply_some(p, matrices, count, work, t, used, 16, sums);
            scale_rows(p, matrices, count, t, used, 16, 0, rows, sums);
        }
    }
    free(owned);
    return 1;
}

/* Products with residual-quantised rows: tables of the products of codebook entries and inputs, and sums of what the
 * indices pick from them (products.md).
 *
 * An entry's products with 1, 4, 8 or 16 inputs stand side by side. Of one input, sixteen rows at a time gather their
 * entries; of several, one load a row picks them all. Tables of a batch of vectors, 24 KB at three stages of 256
 * entries (48 KB of sixteen inputs), stay in the first cache while all rows pass. */

#define MAX_TOGETHER 16 /* inputs side by side */
#define BATCH_PLACES 8  /* vectors of a batch times inputs side by side, unless one vector has more */
#define TABLE (MAX_ENTRIES * MAX_TOGETHER)

/* What a product works in, beside the sums of rows. */
struct rvq_work {
    _Alignas(64) float books[MAX_STAGES][DIMENSION][MAX_ENTRIES * BATCH_PLACES]; /* each number `repeated` times */
    _Alignas(64) float tables[MAX_STAGES * TABLE];                               /* [vector][stage][entry][input] */
    float entries[MAX_STAGES][MAX_ENTRIES][DIMENSION];
    int stages;
};

static void read_codebooks(struct rvq_work *work, const uint16_t *codebooks, int stages, int entries)
{
    memset(work->entries, 0, sizeof work->entries); /* whole, so that no code leaves the tables */
    work->stages = stages;
    for (int stage = 0; stage < stages; stage++) {
        int64_t count = (int64_t)entries * DIMENSION;
        PATH(half_to_single)(codebooks + stage * count, count, work->entries[stage][0]);
    }
}

/* Transposed codebooks, each number as often as there are inputs side by side; sixteen are filled by broadcasts. */
static void spread_codebooks(struct rvq_work *work, int repeated)
{
    for (int stage = 0; stage < work->stages; stage++) {
        for (int e = 0; e < MAX_ENTRIES; e++) {
            for (int d = 0; d < DIMENSION; d++) {
                for (int j = 0; j < repeated; j++) work->books[stage][d][e * repeated + j] = work->entries[stage][e][d];
            }
        }
    }
}

/* Tables [vector][stage][entry][input] of a batch; x [vector][8][16], the inputs again and again where fewer than
 * sixteen stand side by side. */
PATH_INLINE void fill_products(struct rvq_work *work, const float *x, int vectors, const int together)
{
    const int spread = together == WIDE ? 1 : together, step = together == WIDE ? 1 : WIDE;
    const int table = MAX_ENTRIES * together;
    for (int stage = 0; stage < work->stages; stage++) {
        float *to = work->tables + stage * table;
        for (int at = 0; at < MAX_ENTRIES * spread; at += step, to += WIDE) {
            wide entry[DIMENSION];
            for (int d = 0; d < DIMENSION; d++) {
                entry[d] = together == WIDE ? wide_all(work->entries[stage][at][d])
                                            : wide_load(work->books[stage][d] + at);
            }
            for (int v = 0; v < vectors; v++) {
                const float *input = x + v * DIMENSION * WIDE;
                wide sum = wide_multiply(entry[0], wide_load(input));
                for (int d = 1; d < DIMENSION; d++) sum = wide_fma(entry[d], wide_load(input + d * WIDE), sum);
                wide_store(to + v * work->stages * table, sum);
            }
        }
    }
}

/* x [vector][8][16] of a batch from column `left` on, zero past the columns and past the `used` inputs from t on. */
PATH_INLINE void spread_inputs(const struct product *p, int64_t t, int64_t used, int64_t left, int64_t vectors,
                               const int together, float *x)
{
    for (int64_t c = left; c < left + vectors * DIMENSION; c++, x += WIDE) {
        for (int64_t j = 0; j < together; j++) x[j] = c < p->cols && j < used ? p->inputs[(t + j) * p->cols + c] : 0.0f;
        for (int j = together; j < WIDE; j++) x[j] = x[j - together];
    }
}

/* Sixteen rows and one input: adds a batch of vectors to their sums. */
PATH_INLINE void gather_rows(const float *table, const uint8_t *codes, int vectors, const int stages, float *sums)
{
    wide acc = wide_load(sums);
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

/* Several inputs: adds one vector to the sums [row][input] of some rows of a block. */
#define DEFINE_PICK(name, type, together)                                                                           \
    PATH_INLINE void name(const float *table, const uint8_t *codes, int64_t rows, const int stages, float *sums)    \
    {                                                                                                               \
        for (int64_t r = 0; r < rows; r++, sums += together) {                                                      \
            type sum = type##_load(table + codes[r] * together);                                                    \
            for (int stage = 1; stage < stages; stage++) {                                                          \
                const float *of_stage = table + stage * MAX_ENTRIES * together;                                     \
                sum = type##_add(sum, type##_load(of_stage + codes[stage * BLOCK_ROWS + r] * together));            \
            }                                                                                                       \
            type##_store(sums, type##_add(type##_load(sums), sum));                                                 \
        }                                                                                                           \
    }
DEFINE_PICK(pick_four, four, 4)
DEFINE_PICK(pick_eight, eight, 8)
DEFINE_PICK(pick_wide, wide, 16)

/* Adds a batch to the sums of rows top to stop, of which top is a multiple of 16 if there is one input. While a block
 * is worked on, its codes for the next batch are fetched. */
PATH_INLINE void add_batch(const struct rvq_work *work, const uint8_t *codes, int64_t all, int64_t v, int64_t vectors,
                           int64_t top, int64_t stop, const int stages, const int together, float *sums)
{
    const int64_t block_bytes = all * stages * BLOCK_ROWS, vector_bytes = stages * BLOCK_ROWS;
    const int64_t ahead = all - v - vectors < vectors ? all - v - vectors : vectors;
    for (int64_t row = top, end; row < stop; row = end) {
        const uint8_t *block = codes + row / BLOCK_ROWS * block_bytes + v * vector_bytes;
        end = (row / BLOCK_ROWS + 1) * BLOCK_ROWS < stop ? (row / BLOCK_ROWS + 1) * BLOCK_ROWS : stop;
        for (int64_t line = 0; line < ahead * stages; line++) {
            FETCH(block + vectors * vector_bytes + line * BLOCK_ROWS);
        }
        if (together == 1) {
            for (; row < end; row += WIDE, sums += WIDE) {
                gather_rows(work->tables, block + row % BLOCK_ROWS, (int)vectors, stages, sums);
            }
        } else {
            for (int64_t k = 0; k < vectors; k++) {
                const float *table = work->tables + k * stages * MAX_ENTRIES * together;
                const uint8_t *from = block + k * vector_bytes + row % BLOCK_ROWS;
                if (together == 4) {
                    pick_four(table, from, end - row, stages, sums);
                } else if (together == 8) {
                    pick_eight(table, from, end - row, stages, sums);
                } else {
                    pick_wide(table, from, end - row, stages, sums);
                }
            }
            sums += (end - row) * together;
        }
    }
}

/* Inputs t to t + used of a product; sums [matrix][row][together], `rows` a matrix, from row `top` on. */
PATH_INLINE void multiply_some(const struct product *p, const struct rvq_matrix *matrices, int count,
                               struct rvq_work *work, int64_t t, int64_t used, const int together, int64_t top,
                               int64_t rows, float *sums)
{
    const int64_t all = (p->cols + DIMENSION - 1) / DIMENSION;
    const int64_t batch = together < BATCH_PLACES ? BATCH_PLACES / together : 1;
    for (int64_t v = 0, vectors; v < all; v += vectors) {
        _Alignas(64) float x[BATCH_PLACES * DIMENSION * WIDE];
        vectors = all - v < batch ? all - v : batch;
        spread_inputs(p, t, used, v * DIMENSION, vectors, together, x);
        fill_products(work, x, (int)vectors, together);
        for (int k = 0; k < count; k++) {
            const uint8_t *codes = matrices[k].codes;
            float *own = sums + k * rows * together;
            switch (work->stages) {
            case 1: add_batch(work, codes, all, v, vectors, top, p->stop, 1, together, own); break;
            case 2: add_batch(work, codes, all, v, vectors, top, p->stop, 2, together, own); break;
            case 3: add_batch(work, codes, all, v, vectors, top, p->stop, 3, together, own); break;
            default: add_batch(work, codes, all, v, vectors, top, p->stop, 4, together, own);
            }
        }
    }
}

/* Results: sums times the scales of their rows. */
static void scale_rows(const struct product *p, const struct rvq_matrix *matrices, int count, int64_t t, int64_t used,
                       int64_t together, int64_t top, int64_t rows, const float *sums)
{
    for (int k = 0; k < count; k++) {
        const float unit = ldexpf(1.0f, matrices[k].exponent);
        const float *from = sums + (k * rows + p->first - top) * together;
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
    /* Gathers take whole runs of sixteen rows, which every block has. */
    const int64_t top = p->first / WIDE * WIDE, rows = (p->stop - top + WIDE - 1) / WIDE * WIDE;
    const int64_t most = p->count > 1 ? MAX_TOGETHER : 1;
    const int64_t sums_bytes = count * rows * most * (int64_t)sizeof(float);
    void *owned;
    struct rvq_work *work = lines((int64_t)sizeof *work + sums_bytes, &owned);
    if (!work) return 0;
    float *sums = (float *)(work + 1);
    read_codebooks(work, codebooks, stages, entries);
    for (int64_t t = 0, used, spread = 0; t < p->count; t += used) {
        const int64_t left = p->count - t;
        used = left < MAX_TOGETHER ? left : MAX_TOGETHER;
        const int together = used == 1 ? 1 : used <= 4 ? 4 : used <= 8 ? 8 : 16;
        if (together < WIDE && together != spread) spread_codebooks(work, together);
        spread = together;
        memset(sums, 0, (size_t)(count * rows * together) * sizeof(float));
        switch (together) {
        case 1: multiply_some(p, matrices, count, work, t, used, 1, top, rows, sums); break;
        case 4: multiply_some(p, matrices, count, work, t, used, 4, top, rows, sums); break;
        case 8: multiply_some(p, matrices, count, work, t, used, 8, top, rows, sums); break;
        default: multiply_some(p, matrices, count, work, t, used, 16, top, rows, sums);
        }
        scale_rows(p, matrices, count, t, used, together, top, rows, sums);
    }
    free(owned);
    return 1;
}

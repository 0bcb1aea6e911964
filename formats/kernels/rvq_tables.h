/* What the search on the grid needs of a set of codebooks, laid out for vectors of LANES. */

#define CHUNK_WORDS (PAIRS * LANES) /* int32 of codes for LANES entries: [pair][low half, high half][LANES / 2] */
#define MAX_TABLES (MAX_STAGES * (MAX_STAGES - 1) / 2)

struct rvq_tables {
    _Alignas(64) int32_t codes[MAX_STAGES * MAX_ENTRIES / LANES][CHUNK_WORDS]; /* negated components, by pairs */
    _Alignas(64) int32_t bias[MAX_STAGES * MAX_ENTRIES / LANES][LANES];        /* |c|**2 / 2, plus one half to round */
    _Alignas(64) int32_t index[MAX_ENTRIES / LANES][LANES];                    /* entry at each place of a chunk */
    _Alignas(64) int16_t gram[MAX_TABLES][MAX_ENTRIES * MAX_ENTRIES];          /* scores c.c', [earlier][later, padded] */
    _Alignas(64) int16_t entry[MAX_STAGES][MAX_ENTRIES][DIMENSION];
    uint8_t trusted[MAX_STAGES][MAX_ENTRIES];
    int stages;
    int padded;      /* entries rounded up to a multiple of 64 */
    int usable;      /* whether each stage has an entry within the bounds of the grid */
};

/* Products of a stage's entries with those of an earlier stage. */
static inline int16_t *gram_table(struct rvq_tables *tables, int later, int earlier)
{
    return tables->gram[later * (later - 1) / 2 + earlier];
}

/* Row of a Gram table: what entry `code` of an earlier stage adds to the scores of a later one. */
static inline const int16_t *gram_row(const struct rvq_tables *tables, int later, int earlier, int code, int padded)
{
    return tables->gram[later * (later - 1) / 2 + earlier] + code * padded;
}

static int is_repeated(const int16_t (*entries)[DIMENSION], int e)
{
    for (int earlier = 0; earlier < e; earlier++) {
        if (memcmp(entries[earlier], entries[e], sizeof entries[e]) == 0) return 1;
    }
    return 0;
}

/* Entries out of the grid's bounds, and copies of earlier ones, which would fill the beam, must not win. Their bias
 * sees to it, and their products are zero. */
static void fill_stage(struct rvq_tables *tables, const float *codebook, int stage, int entries, int greedy)
{
    int trusted_entries = 0;
    for (int e = 0; e < tables->padded; e++) {
        /* narrow16 puts runs of four from the low and the high half in turn; undone here, scores come out in order */
        int chunk = (stage * tables->padded + e) / LANES, lane = e % LANES;
        int place = (lane >> 2 & 1) * (LANES / 2) + (lane >> 3) * 4 + (lane & 3);
        int64_t norm = 0;
        int16_t *entry = tables->entry[stage][e];
        for (int d = 0; d < DIMENSION; d++) {
            entry[d] = e < entries ? to_grid(codebook[e * DIMENSION + d]) : 0;
            norm += (int32_t)entry[d] * entry[d];
        }
        int trusted = e < entries && norm <= (stage ? LATER_NORM : FIRST_NORM) &&
                      !is_repeated((const int16_t(*)[DIMENSION])tables->entry[stage], e);
        trusted_entries += trusted;
        tables->trusted[stage][e] = (uint8_t)trusted;
        tables->index[e / LANES][place] = e;
        tables->bias[chunk][place] = trusted  ? (int32_t)(norm >> 1) + (1 << (SCORE_SHIFT - 1))
                                     : greedy ? INT32_MAX
                                              : PASSED_OVER << SCORE_SHIFT;
        for (int p = 0; p < PAIRS; p++) {
            uint32_t low = (uint16_t)-entry[2 * p], high = (uint16_t)-entry[2 * p + 1];
            tables->codes[chunk][p * LANES + place] = trusted ? (int32_t)(low | high << 16) : 0;
        }
    }
    tables->usable &= trusted_entries > 0;
}

static void fill_gram(struct rvq_tables *tables, int later, int earlier)
{
    int16_t columns[DIMENSION][MAX_ENTRIES];
    for (int e = 0; e < tables->padded; e++) {
        for (int d = 0; d < DIMENSION; d++) columns[d][e] = tables->trusted[later][e] ? tables->entry[later][e][d] : 0;
    }
    for (int e = 0; e < tables->padded; e++) {
        int16_t *row = gram_table(tables, later, earlier) + e * tables->padded;
        int16_t entry[DIMENSION] = {0};
        if (tables->trusted[earlier][e]) memcpy(entry, tables->entry[earlier][e], sizeof entry);
        for (int l = 0; l < tables->padded; l++) {
            int32_t sum = 1 << (SCORE_SHIFT - 1);
            for (int d = 0; d < DIMENSION; d++) sum += (int32_t)entry[d] * columns[d][l];
            row[l] = (int16_t)shifted(sum); /* of zeros: 0 */
        }
    }
}

/* Codebooks float32 [stages][entries][8], for one of the two searches. */
static void fill_tables(struct rvq_tables *tables, const float *codebooks, int stages, int entries, int greedy)
{
    tables->stages = stages;
    tables->padded = (entries + 63) / 64 * 64;
    tables->usable = 1;
    for (int stage = 0; stage < stages; stage++) {
        fill_stage(tables, codebooks + stage * entries * DIMENSION, stage, entries, greedy);
        for (int earlier = 0; !greedy && earlier < stage; earlier++) fill_gram(tables, stage, earlier);
    }
}

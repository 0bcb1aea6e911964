/* Beam search: after each stage the `width` best partial sums go on, and the last stage takes the best of all.
 *
 * With x the vector and c the entries chosen so far, |x - c - c'|**2 / 2 grows by |c'|**2 / 2 - x.c' + c.c' when c'
 * joins. The first two terms are needed once a vector and entry, the third comes from a Gram table; so a wider
 * beam costs additions of 16-bit scores, not products. A candidate's flat index is (place of its parent) * 256 + entry.
 * The `width` lowest by (score, flat index) are kept, in the order of their flat index; every path keeps the same. */

#define TOGETHER 4                  /* vectors that go through a stage side by side, to hide latencies */
#define STRIPES (64 / LANES)        /* minima are kept of 64 interleaved parts of all scores */
#define MAX_KEYS (4 * MAX_WIDTH)    /* survivors that may wait for the final choice */
#define UNROLLED __attribute__((always_inline)) static inline

struct candidate {
    int16_t score;
    uint8_t code[MAX_STAGES];
};

struct beam {
    _Alignas(64) int16_t products[TOGETHER][MAX_STAGES * MAX_ENTRIES];
    _Alignas(64) int16_t scores[TOGETHER][MAX_WIDTH * MAX_ENTRIES];
    _Alignas(64) int16_t minima[TOGETHER][64];
    _Alignas(64) int16_t rows[MAX_WIDTH][64];
    uint64_t hits[MAX_WIDTH * MAX_ENTRIES / 64];
    uint16_t words[MAX_WIDTH * MAX_ENTRIES / 64];
    uint32_t keys[MAX_KEYS + 64 + 16]; /* a word adds at most 64; 16 fill up the last run */
    struct candidate lists[TOGETHER][2][MAX_WIDTH];
    int length[TOGETHER];
    unsigned lost; /* bit v: no candidate of vector v stayed within the bounds of the grid */
};

/* |c|**2 / 2 - x.c of every entry c as a score. */
static void multiply(const struct rvq_tables *tables, struct beam *beam, const int16_t (*grid)[DIMENSION])
{
    int chunks = tables->stages * tables->padded / LANES;
    for (int first = 0; first < TOGETHER; first += GROUP_VECTORS) {
        lanes32 x[GROUP_VECTORS][PAIRS];
        for (int v = 0; v < GROUP_VECTORS; v++) {
            for (int p = 0; p < PAIRS; p++) {
                uint32_t low = (uint16_t)grid[first + v][2 * p], high = (uint16_t)grid[first + v][2 * p + 1];
                x[v][p] = all32((int32_t)(low | high << 16));
            }
        }
        for (int chunk = 0; chunk < chunks; chunk++) {
            const int32_t *entries = tables->codes[chunk], *bias = tables->bias[chunk];
            lanes32 low[GROUP_VECTORS], high[GROUP_VECTORS];
            for (int v = 0; v < GROUP_VECTORS; v++) {
                low[v] = load32(bias);
                high[v] = load32(bias + LANES / 2);
            }
            for (int p = 0; p < PAIRS; p++) {
                lanes32 low_pair = load32(entries + p * LANES), high_pair = load32(entries + p * LANES + LANES / 2);
                for (int v = 0; v < GROUP_VECTORS; v++) {
                    low[v] = dot32(low[v], x[v][p], low_pair);
                    high[v] = dot32(high[v], x[v][p], high_pair);
                }
            }
            for (int v = 0; v < GROUP_VECTORS; v++) {
                store16(beam->products[first + v] + chunk * LANES, narrow16(low[v], high[v]));
            }
        }
    }
}

/* The Gram rows of a candidate for a later stage. */
UNROLLED void gram_rows(const struct rvq_tables *tables, const struct candidate *from, int stage, int padded,
                        const int16_t **rows)
{
    for (int earlier = 0; earlier < stage; earlier++) {
        rows[earlier] = gram_row(tables, stage, earlier, from->code[earlier], padded);
    }
}

/* New scores of a candidate with `base`. Sums may wrap on the way, as the result is within 16 bits; only in the first
 * stage it may not be, and saturates. */
UNROLLED lanes16 grown(const int16_t *product, const int16_t *const *rows, int stage, int at, lanes16 base)
{
    lanes16 sum = load16(product + at);
    if (stage == 0) return add16_saturated(sum, base);
    for (int earlier = 0; earlier < stage; earlier++) sum = add16(sum, load16(rows[earlier] + at));
    return add16(sum, base);
}

/* Scores of all entries after each candidate, [parent][padded], and the minima of their 64 stripes. */
UNROLLED void score_all(const struct rvq_tables *tables, struct beam *beam, int v, int stage, int padded)
{
    const int16_t *product = beam->products[v] + stage * padded;
    const struct candidate *from = beam->lists[v][stage & 1];
    int16_t *to = beam->scores[v];
    lanes16 least[STRIPES];
    for (int s = 0; s < STRIPES; s++) least[s] = all16(INT16_MAX);
    for (int p = 0; p < beam->length[v]; p++, to += padded) {
        const int16_t *rows[MAX_STAGES];
        gram_rows(tables, &from[p], stage, padded, rows);
        lanes16 base = all16(from[p].score);
        for (int at = 0; at < padded; at += 64) {
            for (int s = 0; s < STRIPES; s++) {
                lanes16 score = grown(product, rows, stage, at + s * LANES, base);
                store16(to + at + s * LANES, score);
                least[s] = min16(least[s], score);
            }
        }
    }
    for (int s = 0; s < STRIPES; s++) store16(beam->minima[v] + s * LANES, least[s]);
}

/* A score not below the width-th lowest of all. Each stripe's minimum is a score of its own, so it is enough that
 * `width` minima lie under it; four-way search, as three counts can run side by side. */
UNROLLED int upper_bound(const int16_t *minima, int width)
{
    int low = least64(minima), span = most64(minima) - low;
    for (int step = 0; step < 3; step++) {
        int quarter = span >> 2, skipped = 0;
        for (int k = 1; k < 4; k++) {
            skipped += __builtin_popcountll(not_above64(minima, all16(low + k * quarter))) < width;
        }
        low += skipped * quarter;
        span = skipped == 3 ? span - 3 * quarter : quarter;
    }
    return low + span;
}

/* Cut a list of distinct keys down to the `width` lowest, order kept. Returns their number. */
static int cut(uint32_t *keys, int count, int width)
{
    uint32_t rank[MAX_KEYS + 64 + 16];
    if (count <= width) return count;
    int filled = (count + 15) / 16 * 16, kept = 0;
    for (int k = count; k < filled; k++) keys[k] = UINT32_MAX;
    for (int k = 0; k < filled; k++) rank[k] = 0;
    for (int other = 0; other < count; other++) {
        for (int k = 0; k < filled; k++) rank[k] += keys[other] < keys[k];
    }
    for (int k = 0; k < count; k++) {
        keys[kept] = keys[k];
        kept += rank[k] < (uint32_t)width;
    }
    return kept;
}

static inline uint32_t key_of(const int16_t *scores, int word, int bit, int words_a_row)
{
    int flat = (word / words_a_row) << 8 | ((word % words_a_row) * 64 + bit);
    return (uint32_t)(scores[word * 64 + bit] - INT16_MIN) << 16 | (uint32_t)flat;
}

/* The candidates that go on, as keys (score from the lowest up, flat index) in the order of flat indices. */
UNROLLED int survivors(struct beam *beam, int v, int width, int padded)
{
    const int16_t *scores = beam->scores[v];
    int words_a_row = padded / 64, words = beam->length[v] * words_a_row, hits = 0, count = 0, tightened = 0;
    int bound = upper_bound(beam->minima[v], width);
    lanes16 limit = all16(bound < HIGHEST_SCORE ? bound : HIGHEST_SCORE);
    for (int word = 0; word < words; word++) {
        uint64_t bits = not_above64(scores + word * 64, limit);
        beam->hits[word] = bits;
        beam->words[hits] = (uint16_t)word;
        hits += bits != 0;
    }
    for (int hit = 0; hit < hits; hit++) {
        int word = beam->words[hit];
        uint64_t bits = beam->hits[word];
        if (tightened && !(bits &= not_above64(scores + word * 64, limit))) continue;
        do { /* mostly one or two: both are written, and the second counted if it exists, without a branch */
            beam->keys[count++] = key_of(scores, word, __builtin_ctzll(bits), words_a_row);
            bits &= bits - 1;
            beam->keys[count] = key_of(scores, word, __builtin_ctzll(bits | 1ull << 63), words_a_row);
            count += bits != 0;
            bits &= bits - 1;
        } while (bits);
        if (count > MAX_KEYS) { /* many equal scores: later ones must be lower than all that are kept */
            uint32_t highest = 0;
            count = cut(beam->keys, count, width);
            for (int k = 0; k < count; k++) highest = beam->keys[k] > highest ? beam->keys[k] : highest;
            if (highest >> 16 == 0) break; /* nothing is lower */
            limit = all16((int32_t)(highest >> 16) + INT16_MIN - 1);
            tightened = 1;
        }
    }
    return cut(beam->keys, count, width);
}

UNROLLED void advance(struct beam *beam, int v, int stage, int width, int padded)
{
    int length = survivors(beam, v, width, padded);
    const struct candidate *from = beam->lists[v][stage & 1];
    struct candidate *to = beam->lists[v][~stage & 1];
    if (length == 0) { /* any candidate will do, as the vector is looked at again */
        beam->lost |= 1u << v;
        beam->keys[length++] = (uint32_t)-INT16_MIN << 16;
    }
    for (int k = 0; k < length; k++) {
        uint32_t key = beam->keys[k];
        int32_t score = (int32_t)(key >> 16) + INT16_MIN;
        to[k] = from[key >> 8 & 0xFF];
        to[k].score = (int16_t)(score > 0 ? score : 0); /* half a square; rounding may have taken it below zero */
        to[k].code[stage] = (uint8_t)key;
    }
    beam->length[v] = length;
}

/* The last stage: only the lowest score matters, so rows are reduced as they come, and one is looked at again. */
UNROLLED void finish(const struct rvq_tables *tables, struct beam *beam, int v, int stage, int padded, uint8_t *codes)
{
    const int16_t *product = beam->products[v] + stage * padded;
    const struct candidate *from = beam->lists[v][stage & 1];
    const int16_t *rows[MAX_STAGES];
    _Alignas(64) int16_t again[64];
    lanes16 best = all16(INT16_MAX);
    for (int p = 0; p < beam->length[v]; p++) {
        lanes16 least[STRIPES], base = all16(from[p].score);
        gram_rows(tables, &from[p], stage, padded, rows);
        for (int s = 0; s < STRIPES; s++) least[s] = all16(INT16_MAX);
        for (int at = 0; at < padded; at += 64) {
            for (int s = 0; s < STRIPES; s++) {
                least[s] = min16(least[s], grown(product, rows, stage, at + s * LANES, base));
            }
        }
        for (int s = 0; s < STRIPES; s++) {
            store16(beam->rows[p] + s * LANES, least[s]);
            best = min16(best, least[s]);
        }
    }
    for (int s = 0; s < STRIPES; s++) store16(again + s * LANES, best);
    int lowest = least64(again), code = 0;
    uint64_t having = 0;
    for (int p = 0; p < beam->length[v]; p++) {
        having |= (uint64_t)(not_above64(beam->rows[p], all16(lowest)) != 0) << p;
    }
    const struct candidate *winner = &from[__builtin_ctzll(having)];
    lanes16 base = all16(winner->score);
    gram_rows(tables, winner, stage, padded, rows);
    for (int at = padded - 64; at >= 0; at -= 64) { /* backwards: the lowest index is written last */
        for (int s = 0; s < STRIPES; s++) {
            store16(again + s * LANES, grown(product, rows, stage, at + s * LANES, base));
        }
        uint64_t bits = not_above64(again, all16(lowest));
        int here = at + __builtin_ctzll(bits | 1ull << 63);
        code = bits ? here : code;
    }
    beam->lost |= (unsigned)(lowest > HIGHEST_SCORE) << v;
    memcpy(codes, winner->code, (size_t)stage);
    codes[stage] = (uint8_t)code;
}

/* A stage for TOGETHER vectors; `stage` and `padded` are constants wherever this is called. */
UNROLLED void beam_stage(const struct rvq_tables *tables, struct beam *beam, int stage, int last, int width, int padded,
                         uint8_t *codes)
{
    if (last) {
        for (int v = 0; v < TOGETHER; v++) finish(tables, beam, v, stage, padded, codes + v * (stage + 1));
    } else {
        for (int v = 0; v < TOGETHER; v++) score_all(tables, beam, v, stage, padded);
        for (int v = 0; v < TOGETHER; v++) advance(beam, v, stage, width, padded);
    }
}

UNROLLED void beam_stages(const struct rvq_tables *tables, struct beam *beam, const int *widths, int padded,
                          uint8_t *codes)
{
    int last = tables->stages - 1;
    beam_stage(tables, beam, 0, last == 0, widths[0], padded, codes);
    if (last >= 1) beam_stage(tables, beam, 1, last == 1, widths[1], padded, codes);
    if (last >= 2) beam_stage(tables, beam, 2, last == 2, widths[2], padded, codes);
    if (last >= 3) beam_stage(tables, beam, 3, 1, 1, padded, codes);
}

/* Indices of TOGETHER vectors on the grid, uint8 [TOGETHER][stages]. Returns a bit for each vector that is lost. */
static unsigned search_beam(const struct rvq_tables *tables, struct beam *beam, const int16_t (*grid)[DIMENSION],
                            const int *widths, uint8_t *codes)
{
    beam->lost = 0;
    for (int v = 0; v < TOGETHER; v++) { /* sums start at |x|**2 / 2 */
        int64_t norm = 0;
        for (int d = 0; d < DIMENSION; d++) norm += (int32_t)grid[v][d] * grid[v][d];
        beam->lists[v][0][0].score = saturated((int32_t)(norm >> 1 >> SCORE_SHIFT));
        beam->length[v] = 1;
    }
    multiply(tables, beam, grid);
    if (tables->padded == MAX_ENTRIES) {
        beam_stages(tables, beam, widths, MAX_ENTRIES, codes);
    } else {
        beam_stages(tables, beam, widths, tables->padded, codes);
    }
    return beam->lost;
}

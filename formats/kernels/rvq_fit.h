/* What fitting codebooks to chosen indices needs: sums over vectors, and sweeps over the normal equations.
 *
 * Every sum is in float64 and in the order of the vectors or entries, with a product rounded before it is added, so
 * all paths give the same bits. Table of stages a < b: number b (b - 1) / 2 + a, [entry of a][entry of b]. */

static int64_t table_size(int entries) { return (int64_t)entries * entries; }

static void PATH(fit_counts)(const float *vectors, const uint8_t *codes, int64_t count, int stages, int entries,
                             uint32_t *pairs, uint32_t *totals, double *sums)
{
    for (int64_t v = 0; v < count; v++, codes += stages, vectors += DIMENSION) {
        for (int b = 0; b < stages; b++) {
            double *sum = sums + (b * entries + codes[b]) * DIMENSION;
            for (int d = 0; d < DIMENSION; d++) sum[d] += vectors[d];
            totals[b * entries + codes[b]]++;
            for (int a = 0; a < b; a++) {
                pairs[(b * (b - 1) / 2 + a) * table_size(entries) + codes[a] * entries + codes[b]]++;
            }
        }
    }
}

static void PATH(fit_moments)(const float *vectors, const float *weights, const uint8_t *codes, int64_t count,
                              int stages, int entries, double *pairs, double *totals, double *sums)
{
    for (int64_t v = 0; v < count; v++, codes += stages, vectors += DIMENSION, weights += DIMENSION) {
        for (int b = 0; b < stages; b++) {
            int64_t place = (b * entries + codes[b]) * DIMENSION;
            for (int d = 0; d < DIMENSION; d++) {
                sums[place + d] += (double)weights[d] * vectors[d]; /* exact: 24 bits times 24 bits */
                totals[place + d] += weights[d];
            }
            for (int a = 0; a < b; a++) {
                double *pair = pairs + ((b * (b - 1) / 2 + a) * table_size(entries) + codes[a] * entries + codes[b]) * DIMENSION;
                for (int d = 0; d < DIMENSION; d++) pair[d] += weights[d];
            }
        }
    }
}

/* One Gauss-Seidel sweep: each stage in turn is set to its optimum given the others. Codebooks float64
 * [stages][entries][8]; entries without vectors stay. `wide` says whether tables hold 8 float64 (moments) or one
 * uint32 (counts) a cell. */
UNROLLED void sweep(double *codebooks, int stages, int entries, const void *pairs, const void *totals,
                    const double *sums, int wide)
{
    static const int width = DIMENSION;
    double rest[MAX_ENTRIES][DIMENSION];
    for (int stage = 0; stage < stages; stage++) {
        memcpy(rest, sums + stage * entries * width, (size_t)(entries * width) * sizeof(double));
        for (int other = 0; other < stages; other++) {
            if (other == stage) continue;
            int later = stage > other ? stage : other, earlier = stage < other ? stage : other;
            int64_t table = (later * (later - 1) / 2 + earlier) * table_size(entries);
            const double *with = codebooks + other * entries * width;
            /* Outer loop over the rows of the table as it lies in memory; for each entry of this stage the order of
             * the additions is the same, by rising entry of the other stage. */
            for (int row = 0; row < entries; row++) {
                for (int col = 0; col < entries; col++) {
                    int64_t cell = table + (int64_t)row * entries + col;
                    double *target = rest[earlier == stage ? row : col];
                    const double *entry = with + (earlier == stage ? col : row) * width;
                    if (wide) {
                        const double *moment = (const double *)pairs + cell * width;
                        for (int d = 0; d < width; d++) target[d] -= moment[d] * entry[d];
                    } else {
                        double number = ((const uint32_t *)pairs)[cell];
                        for (int d = 0; d < width; d++) target[d] -= number * entry[d];
                    }
                }
            }
        }
        for (int e = 0; e < entries; e++) {
            double *entry = codebooks + (stage * entries + e) * width;
            for (int d = 0; d < width; d++) {
                double total = wide ? ((const double *)totals)[(stage * entries + e) * width + d]
                                    : ((const uint32_t *)totals)[stage * entries + e];
                if (total > 0.0) entry[d] = rest[e][d] / total;
            }
        }
    }
}

static void PATH(sweep_counts)(double *codebooks, int stages, int entries, const uint32_t *pairs,
                               const uint32_t *totals, const double *sums, int sweeps)
{
    for (int k = 0; k < sweeps; k++) sweep(codebooks, stages, entries, pairs, totals, sums, 0);
}

static void PATH(sweep_moments)(double *codebooks, int stages, int entries, const double *pairs, const double *totals,
                                const double *sums, int sweeps)
{
    for (int k = 0; k < sweeps; k++) sweep(codebooks, stages, entries, pairs, totals, sums, 1);
}

/* Decoding, in float32 with each operation rounded once (SPEC.md and the codecs' pages). */

#define TILE_ROWS 16 /* rows decoded side by side: their lines stay in the first cache whatever the row length is */
#define BLOCK_ROWS 64

static void PATH(decode_rvq)(const uint8_t *codes, const float *codebooks, const float *scales, int64_t rows,
                             int64_t cols, int stages, int entries, float *values)
{
    float entry[MAX_STAGES][MAX_ENTRIES][DIMENSION] = {{{0}}}; /* whole, so that no code leaves it */
    int64_t vectors = (cols + DIMENSION - 1) / DIMENSION;
    for (int stage = 0; stage < stages; stage++) {
        memcpy(entry[stage], codebooks + stage * entries * DIMENSION, (size_t)(entries * DIMENSION) * sizeof(float));
    }
    for (int64_t top = 0; top < rows; top += TILE_ROWS) {
        int64_t used = rows - top < TILE_ROWS ? rows - top : TILE_ROWS;
        const uint8_t *tile = codes + top / BLOCK_ROWS * vectors * stages * BLOCK_ROWS + top % BLOCK_ROWS;
        for (int64_t v = 0; v < vectors; v++) {
            const uint8_t *lines = tile + v * stages * BLOCK_ROWS;
            int width = cols - v * DIMENSION < DIMENSION ? (int)(cols - v * DIMENSION) : DIMENSION;
            for (int64_t r = 0; r < used; r++) {
                float sum[DIMENSION];
                memcpy(sum, entry[0][lines[r]], sizeof sum);
                for (int stage = 1; stage < stages; stage++) {
                    const float *next = entry[stage][lines[stage * BLOCK_ROWS + r]];
                    for (int d = 0; d < DIMENSION; d++) sum[d] += next[d];
                }
                for (int d = 0; d < DIMENSION; d++) sum[d] *= scales[top + r];
                float *to = values + (top + r) * cols + v * DIMENSION;
                if (width == DIMENSION) {
                    memcpy(to, sum, sizeof sum);
                } else {
                    memcpy(to, sum, (size_t)width * sizeof(float));
                }
            }
        }
    }
}

/* Codes as stored: [blocks][vectors][stages][64], rows past the end 0; from and to [rows][vectors][stages]. */
static void PATH(pack_rvq)(const uint8_t *plain, int64_t rows, int64_t vectors, int stages, uint8_t *packed)
{
    int64_t line = vectors * stages;
    for (int64_t top = 0; top < rows; top += BLOCK_ROWS) {
        int64_t used = rows - top < BLOCK_ROWS ? rows - top : BLOCK_ROWS;
        uint8_t *block = packed + top * line;
        if (used < BLOCK_ROWS) memset(block, 0, (size_t)(line * BLOCK_ROWS));
        for (int64_t r = 0; r < used; r++) {
            const uint8_t *from = plain + (top + r) * line;
            for (int64_t k = 0; k < line; k++) block[k * BLOCK_ROWS + r] = from[k];
        }
    }
}

static void PATH(unpack_rvq)(const uint8_t *packed, int64_t rows, int64_t vectors, int stages, uint8_t *plain)
{
    int64_t line = vectors * stages;
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *from = packed + row / BLOCK_ROWS * BLOCK_ROWS * line + row % BLOCK_ROWS;
        uint8_t *to = plain + row * line;
        for (int64_t k = 0; k < line; k++) to[k] = from[k * BLOCK_ROWS];
    }
}

/* Pairs float32 [256][2]: the two numbers of a byte; factors float32 [256]: what a scale byte means. */
static void PATH(decode_mxfp4)(const uint8_t *codes, const uint8_t *scales, const float *pairs, const float *factors,
                               int64_t rows, int64_t cols, float *values)
{
    const int64_t group = 32, stride = (cols + 1) / 2, groups = (cols + group - 1) / group;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *from = codes + row * stride + g * group / 2;
            float *to = values + row * cols + g * group, factor = factors[scales[row * groups + g]], both[32];
            int64_t width = cols - g * group < group ? cols - g * group : group;
            for (int64_t k = 0; k < (width + 1) / 2; k++) memcpy(both + 2 * k, pairs + 2 * from[k], 2 * sizeof(float));
            if (width == group) {
                for (int k = 0; k < 32; k++) to[k] = both[k] * factor;
            } else {
                for (int64_t k = 0; k < width; k++) to[k] = both[k] * factor;
            }
        }
    }
}

/* Factors float32 [rows][groups]: scale times 2**e. */
static void PATH(decode_group_int)(const uint8_t *codes, const float *factors, int64_t rows, int64_t cols, int bits,
                                   int64_t group, float *values)
{
    const int64_t stride = bits == 8 ? cols : (cols + 1) / 2, groups = (cols + group - 1) / group;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t g = 0; g < groups; g++) {
            int64_t left = g * group, width = cols - left < group ? cols - left : group, half = (width + 1) / 2;
            float *to = values + row * cols + left, factor = factors[row * groups + g];
            if (bits == 8) {
                const int8_t *from = (const int8_t *)codes + row * stride + left;
                for (int64_t k = 0; k < width; k++) to[k] = (float)from[k] * factor;
            } else { /* groups have an even width, so each starts at a whole byte */
                const uint8_t *from = codes + row * stride + left / 2;
                for (int64_t k = 0; k < half; k++) to[k] = (float)((from[k] & 15) - 8) * factor;
                for (int64_t k = 0; k < width - half; k++) to[half + k] = (float)((from[k] >> 4) - 8) * factor;
            }
        }
    }
}

/* For each row float64 [4]: sums over its columns of w a a, w a b, w b b and w (a - b)**2.
 * Column c adds to lane c % 8; at the end ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
static void PATH(row_sums)(const float *a, const float *b, const float *weights, int64_t rows, int64_t cols,
                           double *sums)
{
    for (int64_t row = 0; row < rows; row++, a += cols, b += cols) {
        double lane[4][DIMENSION] = {{0}};
        for (int64_t left = 0; left < cols; left += DIMENSION) {
            int width = cols - left < DIMENSION ? (int)(cols - left) : DIMENSION;
            double x[DIMENSION] = {0}, y[DIMENSION] = {0}, w[DIMENSION] = {0};
            if (width == DIMENSION) {
                for (int d = 0; d < DIMENSION; d++) x[d] = a[left + d];
                for (int d = 0; d < DIMENSION; d++) y[d] = b[left + d];
                for (int d = 0; d < DIMENSION; d++) w[d] = weights ? weights[left + d] : 1.0;
            } else {
                for (int d = 0; d < width; d++) x[d] = a[left + d];
                for (int d = 0; d < width; d++) y[d] = b[left + d];
                for (int d = 0; d < width; d++) w[d] = weights ? weights[left + d] : 1.0;
            }
            for (int d = 0; d < DIMENSION; d++) {
                double gap = x[d] - y[d];
                lane[0][d] += w[d] * (x[d] * x[d]);
                lane[1][d] += w[d] * (x[d] * y[d]);
                lane[2][d] += w[d] * (y[d] * y[d]);
                lane[3][d] += w[d] * (gap * gap);
            }
        }
        for (int k = 0; k < 4; k++) {
            const double *l = lane[k];
            sums[row * 4 + k] = ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
        }
    }
}

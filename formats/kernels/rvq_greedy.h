/* Greedy search: in each stage the nearest entry to what is left, the lowest index among equals. */

/* Indices of GROUP_VECTORS vectors on the grid, int16 [..][8], which become what is left of them. */
static void search_greedy(const struct rvq_tables *tables, int16_t left[][DIMENSION], uint8_t *codes)
{
    int chunks = tables->padded / LANES;
    for (int stage = 0; stage < tables->stages; stage++) {
        lanes32 x[GROUP_VECTORS][PAIRS], best[GROUP_VECTORS];
        for (int v = 0; v < GROUP_VECTORS; v++) {
            for (int p = 0; p < PAIRS; p++) {
                uint32_t low = (uint16_t)left[v][2 * p], high = (uint16_t)left[v][2 * p + 1];
                x[v][p] = all32((int32_t)(low | high << 16));
            }
            best[v] = all32(INT32_MAX);
        }
        for (int chunk = 0; chunk < chunks; chunk++) {
            const int32_t *entries = tables->codes[stage * chunks + chunk];
            const int32_t *bias = tables->bias[stage * chunks + chunk];
            for (int half = 0; half < LANES; half += LANES / 2) {
                lanes32 score[GROUP_VECTORS];
                for (int v = 0; v < GROUP_VECTORS; v++) score[v] = load32(bias + half);
                for (int p = 0; p < PAIRS; p++) {
                    lanes32 pair = load32(entries + p * LANES + half);
                    for (int v = 0; v < GROUP_VECTORS; v++) score[v] = dot32(score[v], x[v][p], pair);
                }
                /* The index rides in the low bits, worth 2**-14 of a score: one minimum finds both. */
                lanes32 index = load32(tables->index[chunk] + half);
                for (int v = 0; v < GROUP_VECTORS; v++) best[v] = min32(best[v], mark32(score[v], index));
            }
        }
        for (int v = 0; v < GROUP_VECTORS; v++) {
            int code = least32(best[v]) & (MAX_ENTRIES - 1);
            codes[v * tables->stages + stage] = (uint8_t)code;
            const int16_t *entry = tables->entry[stage][code];
            for (int d = 0; d < DIMENSION; d++) left[v][d] = saturated(left[v][d] - entry[d]);
        }
    }
}

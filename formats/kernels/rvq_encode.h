/* Indices of many vectors: on the grid where they are short enough for it, else in float64. */

#define BATCH 64 /* a multiple of GROUP_VECTORS and of TOGETHER */

struct rvq_search {
    struct rvq_tables tables;
    struct beam beam;
};

/* Up to BATCH vectors on the grid; the rest of it 0. Returns a bit for each vector that is too long, and is left 0. */
static uint64_t place_on_grid(const float *vectors, int used, int16_t grid[BATCH][DIMENSION])
{
    uint64_t beyond = 0;
    int16_t *flat = grid[0];
    for (int k = 0; k < used * DIMENSION; k++) flat[k] = to_grid(vectors[k]);
    memset(grid + used, 0, (size_t)(BATCH - used) * sizeof grid[0]);
    for (int v = 0; v < used; v++) {
        int64_t norm = 0;
        for (int d = 0; d < DIMENSION; d++) norm += (int32_t)grid[v][d] * grid[v][d];
        beyond |= (uint64_t)(norm > FIRST_NORM) << v;
    }
    for (int v = 0; v < used && beyond >> v; v++) {
        if (beyond >> v & 1) memset(grid[v], 0, sizeof grid[v]);
    }
    return beyond;
}

static size_t PATH(search_bytes)(void) { return sizeof(struct rvq_search); }

/* See struct kernels in kernels.h. */
static void PATH(encode)(void *memory, const float *vectors, int64_t count, const float *codebooks, int stages,
                         int entries, const int *widths, uint8_t *codes)
{
    struct rvq_search *search = memory;
    int greedy = 1;
    for (int stage = 0; stage + 1 < stages; stage++) greedy &= widths[stage] == 1;
    fill_tables(&search->tables, codebooks, stages, entries, greedy);
    for (int64_t first = 0; first < count; first += BATCH) {
        _Alignas(64) int16_t grid[BATCH][DIMENSION];
        uint8_t found[BATCH * MAX_STAGES];
        int used = count - first < BATCH ? (int)(count - first) : BATCH;
        /* Bit v: vector v needs the exact search. On the grid it is 0 meanwhile, as are those that fill up the batch. */
        uint64_t beyond = place_on_grid(vectors + first * DIMENSION, used, grid);
        if (!search->tables.usable) beyond = UINT64_MAX;
        if (greedy) {
            for (int v = 0; v < used; v += GROUP_VECTORS) {
                search_greedy(&search->tables, grid + v, found + v * stages);
            }
        } else {
            for (int v = 0; v < used; v += TOGETHER) {
                beyond |= (uint64_t)search_beam(&search->tables, &search->beam, (const int16_t(*)[DIMENSION])(grid + v),
                                                widths, found + v * stages)
                          << v;
            }
        }
        for (int v = 0; v < used && beyond >> v; v++) {
            if (beyond >> v & 1) {
                search_exact(codebooks, stages, entries, widths, vectors + (first + v) * DIMENSION, found + v * stages);
            }
        }
        memcpy(codes + first * stages, found, (size_t)(used * stages));
    }
}

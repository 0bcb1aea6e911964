/* The search without a grid, in float64: for the few vectors that are too long for 16 bits. Each sum has one order. */

struct exact_candidate {
    double score; /* squared length of what is left */
    double left[DIMENSION];
    uint8_t code[MAX_STAGES];
};

/* Keep the `width` lowest, sorted; among equals the earlier one stays in front. Returns the new length. */
static int insert(struct exact_candidate *list, int length, int width, const struct exact_candidate *from, double score,
                  int stage, int code)
{
    if (length == width && score >= list[length - 1].score) return length;
    int at = length < width ? length : width - 1;
    for (; at > 0 && score < list[at - 1].score; at--) list[at] = list[at - 1];
    list[at] = *from;
    list[at].score = score;
    list[at].code[stage] = (uint8_t)code;
    return length < width ? length + 1 : width;
}

/* One vector x: beam search over codebooks float32 [stages][entries][8], the best code into `codes`. */
static void search_exact(const float *codebooks, int stages, int entries, const int *widths, const float *x,
                         uint8_t *codes)
{
    struct exact_candidate lists[2][MAX_WIDTH];
    int length = 1;
    memset(&lists[0][0], 0, sizeof lists[0][0]);
    for (int d = 0; d < DIMENSION; d++) lists[0][0].left[d] = x[d];
    for (int stage = 0; stage < stages; stage++) {
        const struct exact_candidate *from = lists[stage & 1];
        struct exact_candidate *to = lists[~stage & 1];
        const float *codebook = codebooks + stage * entries * DIMENSION;
        int kept = 0, width = stage + 1 < stages ? widths[stage] : 1;
        for (int p = 0; p < length; p++) {
            for (int e = 0; e < entries; e++) {
                double score = 0.0;
                for (int d = 0; d < DIMENSION; d++) {
                    double gap = from[p].left[d] - codebook[e * DIMENSION + d];
                    score += gap * gap;
                }
                kept = insert(to, kept, width, &from[p], score, stage, e);
            }
        }
        for (int k = 0; k < kept; k++) {
            const float *entry = codebook + to[k].code[stage] * DIMENSION;
            for (int d = 0; d < DIMENSION; d++) to[k].left[d] -= entry[d];
        }
        length = kept;
    }
    memcpy(codes, lists[stages & 1][0].code, (size_t)stages);
}

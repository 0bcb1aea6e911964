/* Scales of group_int: for each group the float16 number that leaves the least squared error.
 *
 * Candidates are the largest magnitude over the largest code, times 1 - k / steps for k = 0 .. 15, and then the least-
 * squares scale for the codes of the best of them. A candidate goes through float32 to float16. The error is counted in
 * units of the scale: column c adds (x / s - code)**2 to lane c % 16, in float32, and the lanes join in halves; it is
 * compared as that sum times s**2 in double. The first of equal candidates stays. */

#define FIT_LANES 16
#define FIT_CANDIDATES 16
#define FIT_MAX_GROUP 1024

struct PATH(fit) {
    float error, both, codes; /* sums of (r - q)**2, of r q and of q q, with r = x / s */
};

static float PATH(joined)(float *lane)
{
    for (int half = FIT_LANES / 2; half; half /= 2) {
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    }
    return lane[0];
}

/* Columns come filled up with zeros to whole lanes; these add nothing. */
static struct PATH(fit) PATH(try_scale)(const float *x, int64_t width, float scale, float lowest, float highest)
{
    float error[FIT_LANES] = {0}, both[FIT_LANES] = {0}, codes[FIT_LANES] = {0};
    for (int64_t left = 0; left < width; left += FIT_LANES) {
        for (int l = 0; l < FIT_LANES; l++) {
            float r = x[left + l] / scale, q = rintf(r);
            q = q < lowest ? lowest : q;
            q = q > highest ? highest : q;
            float gap = r - q;
            error[l] += gap * gap;
            both[l] += r * q;
            codes[l] += q * q;
        }
    }
    struct PATH(fit) fit = {PATH(joined)(error), PATH(joined)(both), PATH(joined)(codes)};
    return fit;
}

static uint16_t PATH(as_half)(float value)
{
    uint16_t half;
    PATH(single_to_half)(&value, 1, &half);
    return half;
}

static float PATH(meaning)(uint16_t half, float unit)
{
    float value;
    PATH(half_to_single)(&half, 1, &value);
    return value * unit;
}

/* Values float32 [rows][cols]; scales float16 bits [rows][groups], which mean scale * 2**exponent. */
static void PATH(fit_group_int)(const float *values, int64_t rows, int64_t cols, int bits, int64_t group, int exponent,
                                uint16_t *scales)
{
    const float highest = bits == 8 ? 127.0f : 7.0f, lowest = -highest - 1.0f;
    const double steps = bits == 8 ? 128.0 : 32.0;
    const float unit = ldexpf(1.0f, exponent);
    float x[FIT_MAX_GROUP + FIT_LANES];
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t left = 0; left < cols; left += group) {
            int64_t width = cols - left < group ? cols - left : group, filled = (width + FIT_LANES - 1) / FIT_LANES * FIT_LANES;
            float largest = 0.0f;
            memset(x + filled - FIT_LANES, 0, FIT_LANES * sizeof(float));
            memcpy(x, values + row * cols + left, (size_t)width * sizeof(float));
            for (int64_t c = 0; c < width; c++) largest = fabsf(x[c]) > largest ? fabsf(x[c]) : largest;
            uint16_t best = 0;
            double least = HUGE_VAL;
            struct PATH(fit) found = {0};
            float chosen = 0.0f;
            for (int k = 0; largest > 0.0f && k <= FIT_CANDIDATES; k++) {
                float wanted;
                if (k < FIT_CANDIDATES) {
                    wanted = (float)(ldexp((double)largest, -exponent) / highest * (1.0 - k / steps));
                } else {
                    wanted = found.codes > 0.0f ? (float)(ldexp((double)chosen, -exponent) * found.both / found.codes) : 0.0f;
                }
                uint16_t half = PATH(as_half)(wanted);
                float scale = PATH(meaning)(half, unit);
                if (k == 0) best = half;
                if (half == 0 || half >= 0x7C00) continue; /* nothing, infinite or negative */
                struct PATH(fit) fit = PATH(try_scale)(x, filled, scale, lowest, highest);
                double error = (double)fit.error * scale * scale;
                if (error < least) {
                    least = error;
                    best = half;
                    if (k < FIT_CANDIDATES) {
                        found = fit;
                        chosen = scale;
                    }
                }
            }
            *scales++ = best;
        }
    }
}

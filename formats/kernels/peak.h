/* The peak that benchmarks compare with: multiply-adds of float32 in registers, twelve chains to fill two units. */

#define CHAINS(step) step(a) step(b) step(c) step(d) step(e) step(f) step(g) step(h) step(i) step(j) step(k) step(l)
#define BEGIN(name) floats name = all_floats((float)(#name)[0]); /* all different, or they would be computed once */
#define STEP(name) name = multiply_add(name, factor, term);
#define ADD(name) sum += first_float(name);

/* Returns how many multiply-adds were done; the sum keeps the compiler from leaving them out. */
static int64_t PATH(peak)(int64_t rounds, float *out)
{
    floats factor = all_floats(0.5f), term = all_floats(0.25f);
    float sum = 0.0f;
    CHAINS(BEGIN)
    for (int64_t round = 0; round < rounds; round++) {
        CHAINS(STEP)
    }
    CHAINS(ADD)
    *out = sum;
    return rounds * 12 * FLOATS;
}

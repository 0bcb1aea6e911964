/* The fixed-point grid on which indices are chosen: integers, so that every path gives the same indices.
 *
 * Weights come divided by the root mean square of their row, so a component is about 1 and an error about 0.16;
 * steps of 2**-11 for components and 2**-9 for scores cost a hundredth of a percent of the error. */
#ifndef MOEPACK_RVQ_GRID_H
#define MOEPACK_RVQ_GRID_H

#include <stdint.h>

#define DIMENSION 8
#define PAIRS (DIMENSION / 2)
#define MAX_STAGES 4
#define MAX_ENTRIES 256
#define MAX_WIDTH 64

#define GRID_BITS 11                             /* components are multiples of 2**-11, up to +-16 in 16 bits */
#define SCORE_BITS 9                             /* beam scores are multiples of 2**-9, up to +-64 in 16 bits */
#define SCORE_SHIFT (2 * GRID_BITS - SCORE_BITS) /* from a sum of products to a beam score */
#define INDEX_BITS 8                             /* low bits of a greedy score that carry the index */

/* Within these bounds no sum overflows. Vectors and entries of the first stage have |x|**2 <= 64, entries of later
 * stages |c|**2 <= 32, so x.c' and c.c' stay below 46 and |c'|**2 / 2 - x.c' below 62. A candidate goes on only up to
 * a score of 15.5, half the squared distance that is left; whatever entry joins it, the new score is at most
 * (sqrt(31) + sqrt(32))**2 / 2 < 63. What is beyond the bounds is left to rvq_exact.h. */
#define FIRST_NORM ((int64_t)64 << (2 * GRID_BITS))
#define LATER_NORM ((int64_t)32 << (2 * GRID_BITS))
#define HIGHEST_SCORE (31 << (SCORE_BITS - 1))
/* Product of an entry that must not win: above HIGHEST_SCORE, and a candidate's score can be added to it. */
#define PASSED_OVER (INT16_MAX - HIGHEST_SCORE)

static inline int16_t saturated(int32_t value)
{
    value = value > INT16_MAX ? INT16_MAX : value;
    return (int16_t)(value < INT16_MIN ? INT16_MIN : value);
}

/* Arithmetic shift to the right, written so that the compiler's treatment of negative numbers does not matter. */
static inline int32_t shifted(int32_t value)
{
    return value < 0 ? ~(~value >> SCORE_SHIFT) : value >> SCORE_SHIFT;
}

/* Nearest multiple of 2**-GRID_BITS, half to even, within +-32767 of them; NaN becomes the largest. */
static inline int16_t to_grid(float value)
{
    const float magic = 12582912.0f; /* 1.5 * 2**23: adding it rounds to a whole number */
    float scaled = value * (float)(1 << GRID_BITS);
    scaled = scaled < 32767.0f ? scaled : 32767.0f;
    scaled = scaled > -32767.0f ? scaled : -32767.0f;
    return (int16_t)((scaled + magic) - magic);
}

#endif

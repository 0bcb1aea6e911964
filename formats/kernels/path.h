/* All kernels, compiled for the instructions that the including file has switched on.
 * It defines PATH_NAME (a C name), PATH_LABEL (a string) and includes one of the simd headers. */
#include "kernels.h"
#include "rvq_grid.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define JOIN_AGAIN(kernel, path) kernel##_##path
#define JOIN(kernel, path) JOIN_AGAIN(kernel, path)
#define PATH(kernel) JOIN(kernel, PATH_NAME)

#include PATH_SIMD
#include "rvq_tables.h"
#include "rvq_exact.h"
#include "rvq_greedy.h"
#include "rvq_beam.h"
#include "rvq_encode.h"
#include "rvq_fit.h"
#include "decode.h"
#include "convert.h"
#include "group_fit.h"
#include "products.h"
#include "product_transposed.h"
#include "product_rvq.h"
#include "kda.h"
#include "peak.h"

const struct kernels JOIN(moepack, PATH_NAME) = {
    PATH_LABEL,
    PATH(search_bytes),
    PATH(encode),
    PATH(fit_counts),
    PATH(fit_moments),
    PATH(sweep_counts),
    PATH(sweep_moments),
    PATH(decode_rvq),
    PATH(pack_rvq),
    PATH(unpack_rvq),
    PATH(decode_mxfp4),
    PATH(decode_group_int),
    PATH(fit_group_int),
    PATH(row_sums),
    PATH(half_to_single),
    PATH(single_to_half),
    PATH(bfloat16_to_single),
    PATH(multiply_raw),
    PATH(multiply_mxfp4),
    PATH(multiply_group_int),
    PATH(multiply_rvq),
    PATH(transposed_raw),
    PATH(transposed_group_int),
    PATH(kda_steps),
    PATH(peak),
};

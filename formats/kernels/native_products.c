/* The products of the module formats.kernels._native (products.md). */
#include "native.h"

#define LARGEST_EXPONENT 100

/* The last numbers of each product: count, cols, first, stop, width, at. The result is in buffer `out`. */
static struct product product_of(const struct call *call, int number, int out)
{
    const int64_t *n = call->number + number;
    struct product p = {NULL, n[0], n[1], n[2], n[3], call->view[out].buf, n[4], n[5]};
    return p;
}

/* Whether nothing overflows below, and rows first to stop lie within `rows` and their results within `width`. */
static int good_product(const struct product *p, int64_t rows)
{
    return good_matrix(rows, p->cols) && good_matrix(p->count, p->cols) && good_matrix(p->count, p->width) &&
           p->first <= p->stop && p->stop <= rows && p->at + (p->stop - p->first) <= p->width;
}

static int64_t columns_bytes(int64_t bits, int64_t cols) { return bits == 8 ? cols : (cols + 1) / 2; }

static int good_group_int(int64_t bits, int64_t group, int64_t exponent)
{
    return (bits == 4 || bits == 8) && group >= 32 && group <= 1024 && group % 32 == 0 &&
           exponent <= 2 * LARGEST_EXPONENT;
}

#define RUN_PRODUCT(statement)                   \
    int done;                                    \
    Py_BEGIN_ALLOW_THREADS                       \
    done = statement;                            \
    Py_END_ALLOW_THREADS                         \
    moepack_release(&call);                      \
    if (!done) return PyErr_NoMemory();          \
    Py_RETURN_NONE

#define RUN_PLAIN(statement)                     \
    Py_BEGIN_ALLOW_THREADS                       \
    statement;                                   \
    Py_END_ALLOW_THREADS                         \
    moepack_release(&call);                      \
    Py_RETURN_NONE

KERNEL(multiply_raw) /* path, values, inputs, out; rows, kind, count, cols, first, stop, width, at */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrw", 8)) return NULL;
    int64_t rows = call.number[0], kind = call.number[1];
    struct product p = product_of(&call, 2, 2);
    if (!moepack_in_range(&call, good_product(&p, rows) && kind <= RAW_F16)) return NULL;
    int64_t bytes[] = {rows * p.cols * (kind == RAW_F32 ? 4 : 2), p.count * p.cols * 4, p.count * p.width * 4};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    p.inputs = BUFFER(1);
    RUN_PRODUCT(call.path->multiply_raw(&p, BUFFER(0), (int)kind));
}

KERNEL(multiply_mxfp4) /* path, codes, scales, inputs, out; rows, bias, count, cols, first, stop, width, at */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrrw", 8)) return NULL;
    int64_t rows = call.number[0], bias = call.number[1];
    struct product p = product_of(&call, 2, 3);
    if (!moepack_in_range(&call, good_product(&p, rows) && bias <= 255)) return NULL;
    int64_t bytes[] = {rows * ((p.cols + 1) / 2), rows * ((p.cols + 31) / 32), p.count * p.cols * 4,
                       p.count * p.width * 4};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    p.inputs = BUFFER(2);
    RUN_PRODUCT(call.path->multiply_mxfp4(&p, BUFFER(0), BUFFER(1), (int)bias));
}

/* path, codes, scales, inputs, out; rows, bits, group, exponent + 100, count, cols, first, stop, width, at */
KERNEL(multiply_group_int)
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrrw", 10)) return NULL;
    int64_t rows = call.number[0], bits = call.number[1], group = call.number[2], exponent = call.number[3];
    struct product p = product_of(&call, 4, 3);
    if (!moepack_in_range(&call, good_product(&p, rows) && good_group_int(bits, group, exponent))) return NULL;
    int64_t bytes[] = {rows * columns_bytes(bits, p.cols), rows * ((p.cols + group - 1) / group) * 2,
                       p.count * p.cols * 4, p.count * p.width * 4};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    p.inputs = BUFFER(2);
    RUN_PRODUCT(call.path->multiply_group_int(&p, BUFFER(0), BUFFER(1), (int)bits, group,
                                              (int)exponent - LARGEST_EXPONENT));
}

/* path, codebooks, inputs, (codes, scales, out) of each matrix; rows, stages, entries, exponents + 100, count, cols,
 * first, stop, width, at */
static PyObject *multiply_codes(PyObject *const *args, Py_ssize_t count, const char *buffers, int matrices)
{
    struct call call;
    if (!moepack_take(&call, args, count, buffers, 9 + matrices)) return NULL;
    int64_t rows = call.number[0], stages = call.number[1], entries = call.number[2];
    struct product p = product_of(&call, 3 + matrices, 4);
    int good = good_product(&p, rows) && good_codebooks(stages, entries);
    for (int k = 0; k < matrices; k++) good &= call.number[3 + k] <= 2 * LARGEST_EXPONENT;
    if (!moepack_in_range(&call, good)) return NULL;
    int64_t codes = (rows + 63) / 64 * 64 * ((p.cols + DIMENSION - 1) / DIMENSION) * stages, results = p.count * p.width;
    int64_t bytes[] = {stages * entries * DIMENSION * 2, p.count * p.cols * 4, codes,       rows * 2,
                       results * 4,                      codes,                rows * 2,    results * 4};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    struct rvq_matrix each[2];
    for (int k = 0; k < matrices; k++) {
        each[k].codes = BUFFER(2 + 3 * k);
        each[k].scales = BUFFER(3 + 3 * k);
        each[k].out = BUFFER(4 + 3 * k);
        each[k].exponent = (int)call.number[3 + k] - LARGEST_EXPONENT;
    }
    p.inputs = BUFFER(1);
    RUN_PRODUCT(call.path->multiply_rvq(&p, each, matrices, BUFFER(0), (int)stages, (int)entries));
}

KERNEL(multiply_rvq)
{
    (void)self;
    return multiply_codes(args, count, "rrrrw", 1);
}

KERNEL(multiply_rvq_pair)
{
    (void)self;
    return multiply_codes(args, count, "rrrrwrrw", 2);
}

/* The last numbers of each transposed product: count, cols, row_first, row_stop, first, stop, width, at. */
static struct transposed transposed_of(const struct call *call, int number, int out)
{
    const int64_t *n = call->number + number;
    struct transposed p = {NULL, n[0], n[1], n[2], n[3], n[4], n[5], call->view[out].buf, n[6], n[7]};
    return p;
}

static int good_transposed(const struct transposed *p, int64_t rows)
{
    return good_matrix(rows, p->cols) && good_matrix(p->count, rows) && good_matrix(p->count, p->width) &&
           p->row_first <= p->row_stop && p->row_stop <= rows && p->first <= p->stop && p->stop <= p->cols &&
           p->at + (p->stop - p->first) <= p->width;
}

/* path, values, inputs, out; rows, kind, count, cols, row_first, row_stop, first, stop, width, at */
KERNEL(transposed_raw)
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrw", 10)) return NULL;
    int64_t rows = call.number[0], kind = call.number[1];
    struct transposed p = transposed_of(&call, 2, 2);
    if (!moepack_in_range(&call, good_transposed(&p, rows) && kind <= RAW_F16)) return NULL;
    int64_t bytes[] = {rows * p.cols * (kind == RAW_F32 ? 4 : 2), p.count * (p.row_stop - p.row_first) * 4,
                       p.count * p.width * 4};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    p.inputs = BUFFER(1);
    RUN_PLAIN(call.path->transposed_raw(&p, BUFFER(0), (int)kind));
}

/* path, codes, scales, inputs, out; rows, bits, group, exponent + 100, count, cols, row_first, row_stop, first, stop,
 * width, at */
KERNEL(transposed_group_int)
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrrw", 12)) return NULL;
    int64_t rows = call.number[0], bits = call.number[1], group = call.number[2], exponent = call.number[3];
    struct transposed p = transposed_of(&call, 4, 3);
    if (!moepack_in_range(&call, good_transposed(&p, rows) && good_group_int(bits, group, exponent))) return NULL;
    int64_t bytes[] = {rows * columns_bytes(bits, p.cols), rows * ((p.cols + group - 1) / group) * 2,
                       p.count * (p.row_stop - p.row_first) * 4, p.count * p.width * 4};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    p.inputs = BUFFER(2);
    RUN_PLAIN(call.path->transposed_group_int(&p, BUFFER(0), BUFFER(1), (int)bits, group,
                                              (int)exponent - LARGEST_EXPONENT));
}

/* path, state, q, k, v, decay, beta, out; tokens, heads, dk, dv, first, stop */
KERNEL(kda_steps)
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "wrrrrrw", 6)) return NULL;
    const int64_t *n = call.number;
    struct kda a = {n[0], n[1], n[2], n[3], n[4], n[5]};
    int good = good_matrix(a.heads, a.dk) && good_matrix(a.heads, a.dv) && good_matrix(a.tokens, a.heads) &&
               good_matrix(a.heads * a.dk, a.dv) && good_matrix(a.tokens, a.heads * a.dk) &&
               good_matrix(a.tokens, a.heads * a.dv) && a.first <= a.stop && a.stop <= a.heads;
    if (!moepack_in_range(&call, good)) return NULL;
    int64_t keys = a.tokens * a.heads * a.dk * 4, values = a.tokens * a.heads * a.dv * 4;
    int64_t bytes[] = {a.heads * a.dk * a.dv * 4, keys, keys, values, keys, a.tokens * a.heads * 4, values};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN_PLAIN(call.path->kda_steps(&a, BUFFER(0), BUFFER(1), BUFFER(2), BUFFER(3), BUFFER(4), BUFFER(5), BUFFER(6)));
}

PyMethodDef moepack_product_methods[] = {
    METHOD(multiply_raw),
    METHOD(multiply_mxfp4),
    METHOD(multiply_group_int),
    METHOD(multiply_rvq),
    METHOD(multiply_rvq_pair),
    METHOD(transposed_raw),
    METHOD(transposed_group_int),
    METHOD(kda_steps),
    {NULL, NULL, 0, NULL},
};

/* The module formats.kernels._native: what the packer and the codecs call. Products are in native_products.c. */
#include "native.h"

#include <stdlib.h>
#include <string.h>

#define RUN(statement)           \
    Py_BEGIN_ALLOW_THREADS       \
    statement;                   \
    Py_END_ALLOW_THREADS         \
    moepack_release(&call);      \
    Py_RETURN_NONE

KERNEL(encode) /* path, vectors, codebooks, widths (int32), codes; count, stages, entries */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrrw", 3)) return NULL;
    int64_t n = call.number[0], stages = call.number[1], entries = call.number[2];
    if (!moepack_in_range(&call, good_codebooks(stages, entries))) return NULL;
    int64_t bytes[] = {n * DIMENSION * 4, stages * entries * DIMENSION * 4, stages * 4, n * stages};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    int widths[MAX_STAGES] = {0}, good = 1;
    for (int stage = 0; stage < stages; stage++) {
        widths[stage] = ((const int32_t *)BUFFER(2))[stage];
        good &= widths[stage] >= 1 && widths[stage] <= MAX_WIDTH;
    }
    if (!moepack_in_range(&call, good)) return NULL;
    size_t needed = (call.path->search_bytes() + 63) / 64 * 64;
    char *memory = malloc(needed + 64); /* aligned by hand: not every C library has aligned_alloc */
    if (!memory) {
        moepack_release(&call);
        return PyErr_NoMemory();
    }
    void *aligned = memory + (64 - (uintptr_t)memory % 64);
    Py_BEGIN_ALLOW_THREADS
    call.path->encode(aligned, BUFFER(0), n, BUFFER(1), (int)stages, (int)entries, widths, BUFFER(3));
    Py_END_ALLOW_THREADS
    free(memory);
    moepack_release(&call);
    Py_RETURN_NONE;
}

static int codes_below(const uint8_t *codes, int64_t count, int64_t entries)
{
    int most = 0;
    for (int64_t k = 0; k < count; k++) most = codes[k] > most ? codes[k] : most;
    return most < entries;
}

KERNEL(fit_counts) /* path, vectors, codes, pairs, totals, sums; count, stages, entries */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrwww", 3)) return NULL;
    int64_t n = call.number[0], stages = call.number[1], entries = call.number[2];
    if (!moepack_in_range(&call, good_codebooks(stages, entries))) return NULL;
    int64_t bytes[] = {n * DIMENSION * 4, n * stages, stages * (stages - 1) / 2 * entries * entries * 4,
                       stages * entries * 4, stages * entries * DIMENSION * 8};
    if (!moepack_has_bytes(&call, bytes) || !moepack_in_range(&call, codes_below(BUFFER(1), n * stages, entries))) return NULL;
    RUN(call.path->fit_counts(BUFFER(0), BUFFER(1), n, (int)stages, (int)entries, BUFFER(2), BUFFER(3), BUFFER(4)));
}

KERNEL(fit_moments) /* path, vectors, weights, codes, pairs, totals, sums; count, stages, entries */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrrwww", 3)) return NULL;
    int64_t n = call.number[0], stages = call.number[1], entries = call.number[2];
    if (!moepack_in_range(&call, good_codebooks(stages, entries))) return NULL;
    int64_t cell = DIMENSION * 8;
    int64_t bytes[] = {n * DIMENSION * 4, n * DIMENSION * 4, n * stages,
                       stages * (stages - 1) / 2 * entries * entries * cell, stages * entries * cell,
                       stages * entries * cell};
    if (!moepack_has_bytes(&call, bytes) || !moepack_in_range(&call, codes_below(BUFFER(2), n * stages, entries))) return NULL;
    RUN(call.path->fit_moments(BUFFER(0), BUFFER(1), BUFFER(2), n, (int)stages, (int)entries, BUFFER(3), BUFFER(4),
                               BUFFER(5)));
}

KERNEL(sweep_counts) /* path, codebooks, pairs, totals, sums; stages, entries, sweeps */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "wrrr", 3)) return NULL;
    int64_t stages = call.number[0], entries = call.number[1], sweeps = call.number[2];
    if (!moepack_in_range(&call, good_codebooks(stages, entries) && sweeps <= 1000)) return NULL;
    int64_t bytes[] = {stages * entries * DIMENSION * 8, stages * (stages - 1) / 2 * entries * entries * 4,
                       stages * entries * 4, stages * entries * DIMENSION * 8};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN(call.path->sweep_counts(BUFFER(0), (int)stages, (int)entries, BUFFER(1), BUFFER(2), BUFFER(3), (int)sweeps));
}

KERNEL(sweep_moments) /* path, codebooks, pairs, totals, sums; stages, entries, sweeps */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "wrrr", 3)) return NULL;
    int64_t stages = call.number[0], entries = call.number[1], sweeps = call.number[2];
    if (!moepack_in_range(&call, good_codebooks(stages, entries) && sweeps <= 1000)) return NULL;
    int64_t codebooks = stages * entries * DIMENSION * 8;
    int64_t bytes[] = {codebooks, stages * (stages - 1) / 2 * entries * entries * DIMENSION * 8, codebooks, codebooks};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN(call.path->sweep_moments(BUFFER(0), (int)stages, (int)entries, BUFFER(1), BUFFER(2), BUFFER(3), (int)sweeps));
}

KERNEL(decode_rvq) /* path, codes, codebooks, scales, values; rows, cols, stages, entries */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrrw", 4)) return NULL;
    int64_t rows = call.number[0], cols = call.number[1], stages = call.number[2], entries = call.number[3];
    if (!moepack_in_range(&call, good_codebooks(stages, entries) && good_matrix(rows, cols))) return NULL;
    int64_t blocks = (rows + 63) / 64, vectors = (cols + DIMENSION - 1) / DIMENSION;
    int64_t bytes[] = {blocks * vectors * stages * 64, stages * entries * DIMENSION * 4, rows * 4, rows * cols * 4};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN(call.path->decode_rvq(BUFFER(0), BUFFER(1), BUFFER(2), rows, cols, (int)stages, (int)entries, BUFFER(3)));
}

/* path, from, to; rows, vectors, stages */
static PyObject *reorder(PyObject *const *args, Py_ssize_t count, int pack)
{
    struct call call;
    if (!moepack_take(&call, args, count, "rw", 3)) return NULL;
    int64_t rows = call.number[0], vectors = call.number[1], stages = call.number[2];
    if (!moepack_in_range(&call, good_codebooks(stages, 1) && good_matrix(rows, vectors))) return NULL;
    int64_t plain = rows * vectors * stages, packed = (rows + 63) / 64 * vectors * stages * 64;
    int64_t bytes[] = {pack ? plain : packed, pack ? packed : plain};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN((pack ? call.path->pack_rvq : call.path->unpack_rvq)(BUFFER(0), rows, vectors, (int)stages, BUFFER(1)));
}

KERNEL(pack_rvq)
{
    (void)self;
    return reorder(args, count, 1);
}

KERNEL(unpack_rvq)
{
    (void)self;
    return reorder(args, count, 0);
}

KERNEL(decode_mxfp4) /* path, codes, scales, pairs, factors, values; rows, cols */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrrrw", 2)) return NULL;
    int64_t rows = call.number[0], cols = call.number[1];
    if (!moepack_in_range(&call, good_matrix(rows, cols))) return NULL;
    int64_t bytes[] = {rows * ((cols + 1) / 2), rows * ((cols + 31) / 32), 256 * 2 * 4, 256 * 4, rows * cols * 4};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN(call.path->decode_mxfp4(BUFFER(0), BUFFER(1), BUFFER(2), BUFFER(3), rows, cols, BUFFER(4)));
}

KERNEL(decode_group_int) /* path, codes, factors, values; rows, cols, bits, group */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrw", 4)) return NULL;
    int64_t rows = call.number[0], cols = call.number[1], bits = call.number[2], group = call.number[3];
    int good = good_matrix(rows, cols) && (bits == 4 || bits == 8) && group >= 2 && group <= 1024 && group % 2 == 0;
    if (!moepack_in_range(&call, good)) return NULL;
    int64_t bytes[] = {rows * (bits == 8 ? cols : (cols + 1) / 2), rows * ((cols + group - 1) / group) * 4,
                       rows * cols * 4};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN(call.path->decode_group_int(BUFFER(0), BUFFER(1), rows, cols, (int)bits, group, BUFFER(2)));
}

KERNEL(fit_group_int) /* path, values, scales; rows, cols, bits, group, exponent + 128 */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rw", 5)) return NULL;
    int64_t rows = call.number[0], cols = call.number[1], bits = call.number[2], group = call.number[3];
    int64_t exponent = call.number[4] - 128;
    int good = good_matrix(rows, cols) && (bits == 4 || bits == 8) && group >= 2 && group <= 1024 && group % 2 == 0;
    if (!moepack_in_range(&call, good && exponent >= -100 && exponent <= 100)) return NULL;
    int64_t bytes[] = {rows * cols * 4, rows * ((cols + group - 1) / group) * 2};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN(call.path->fit_group_int(BUFFER(0), rows, cols, (int)bits, group, (int)exponent, BUFFER(1)));
}

KERNEL(row_sums) /* path, a, b, weights (or an empty buffer), sums; rows, cols */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rrrw", 2)) return NULL;
    int64_t rows = call.number[0], cols = call.number[1];
    if (!moepack_in_range(&call, good_matrix(rows, cols))) return NULL;
    int64_t weights = call.view[2].len ? cols * 4 : 0;
    int64_t bytes[] = {rows * cols * 4, rows * cols * 4, weights, rows * 4 * 8};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN(call.path->row_sums(BUFFER(0), BUFFER(1), weights ? BUFFER(2) : NULL, rows, cols, BUFFER(3)));
}

KERNEL(half_to_single) /* path, from, to; count */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rw", 1)) return NULL;
    int64_t bytes[] = {call.number[0] * 2, call.number[0] * 4};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN(call.path->half_to_single(BUFFER(0), call.number[0], BUFFER(1)));
}

KERNEL(single_to_half) /* path, from, to; count */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rw", 1)) return NULL;
    int64_t bytes[] = {call.number[0] * 4, call.number[0] * 2};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN(call.path->single_to_half(BUFFER(0), call.number[0], BUFFER(1)));
}

KERNEL(bfloat16_to_single) /* path, from, to; count */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "rw", 1)) return NULL;
    int64_t bytes[] = {call.number[0] * 2, call.number[0] * 4};
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    RUN(call.path->bfloat16_to_single(BUFFER(0), call.number[0], BUFFER(1)));
}

KERNEL(peak) /* path, one float32; rounds. Returns the number of multiply-adds. */
{
    (void)self;
    struct call call;
    if (!moepack_take(&call, args, count, "w", 1)) return NULL;
    int64_t bytes[] = {4}, done;
    if (!moepack_has_bytes(&call, bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = call.path->peak(call.number[0], BUFFER(0));
    Py_END_ALLOW_THREADS
    moepack_release(&call);
    return PyLong_FromLongLong(done);
}

static PyMethodDef methods[] = {
    {"available", moepack_available, METH_NOARGS, "Paths that run here, best first: a list of (name, number)."},
    METHOD(encode),
    METHOD(fit_counts),
    METHOD(fit_moments),
    METHOD(sweep_counts),
    METHOD(sweep_moments),
    METHOD(decode_rvq),
    METHOD(pack_rvq),
    METHOD(unpack_rvq),
    METHOD(decode_mxfp4),
    METHOD(fit_group_int),
    METHOD(decode_group_int),
    METHOD(row_sums),
    METHOD(half_to_single),
    METHOD(single_to_half),
    METHOD(bfloat16_to_single),
    METHOD(peak),
    {NULL, NULL, 0, NULL},
};

static int add_products(PyObject *module) { return PyModule_AddFunctions(module, moepack_product_methods); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)add_products},
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Compiled kernels; use formats.kernels.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }

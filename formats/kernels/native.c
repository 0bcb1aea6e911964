/* The module formats.kernels._native: checks the lengths of buffers, lets go of the interpreter lock, calls a kernel.
 *
 * Functions take the number of a path, then buffers, then integers. Shapes and dtypes are the business of
 * formats/kernels/__init__.py; what is checked here is that no kernel can leave a buffer. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "rvq_grid.h"

#define MAX_ARGUMENTS 8

static const struct kernels *const paths[] = {
#ifdef MOEPACK_X86
    &moepack_avx512_vnni, &moepack_avx512, &moepack_avx2,
#endif
    &moepack_portable,
};
#define PATHS ((int)(sizeof paths / sizeof paths[0]))

static int runs_here(const struct kernels *path)
{
#ifdef MOEPACK_X86
    __builtin_cpu_init();
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (path == &moepack_avx512_vnni) return wide && __builtin_cpu_supports("avx512vnni");
    if (path == &moepack_avx512) return wide;
    if (path == &moepack_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return path == &moepack_portable;
}

struct call {
    const struct kernels *path;
    Py_buffer view[MAX_ARGUMENTS];
    int views;
    int64_t number[MAX_ARGUMENTS];
};

static void release(struct call *call)
{
    while (call->views > 0) PyBuffer_Release(&call->view[--call->views]);
}

/* Take the arguments: `buffers` has an 'r' or 'w' for each buffer, and `numbers` integers from 0 up follow. On failure
 * an exception is set, nothing is held, and 0 is returned. */
static int take(struct call *call, PyObject *const *args, Py_ssize_t count, const char *buffers, int numbers)
{
    int expected = (int)strlen(buffers);
    call->views = 0;
    if (count != 1 + expected + numbers) {
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
        return 0;
    }
    long path = PyLong_AsLong(args[0]);
    if (path < 0 || path >= PATHS || !runs_here(paths[path])) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no such path on this machine");
        return 0;
    }
    call->path = paths[path];
    for (int k = 0; k < numbers; k++) {
        call->number[k] = PyLong_AsLongLong(args[1 + expected + k]);
        if (call->number[k] < 0 || call->number[k] > (int64_t)1 << 40) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "number out of range");
            return 0;
        }
    }
    for (int k = 0; k < expected; k++) {
        int flags = buffers[k] == 'w' ? PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE : PyBUF_C_CONTIGUOUS;
        if (PyObject_GetBuffer(args[1 + k], &call->view[k], flags) < 0) {
            release(call);
            return 0;
        }
        call->views = k + 1;
    }
    return 1;
}

/* Whether each buffer has as many bytes as stated; if not, an exception is set and all are released. */
static int has_bytes(struct call *call, const int64_t *bytes)
{
    for (int k = 0; k < call->views; k++) {
        if (call->view[k].len != bytes[k]) {
            PyErr_Format(PyExc_ValueError, "buffer %d has another length than the shapes say", k);
            release(call);
            return 0;
        }
    }
    return 1;
}

static int in_range(struct call *call, int good)
{
    if (!good) {
        PyErr_SetString(PyExc_ValueError, "parameter out of range");
        release(call);
    }
    return good;
}

static int good_codebooks(int64_t stages, int64_t entries)
{
    return stages >= 1 && stages <= MAX_STAGES && entries >= 1 && entries <= MAX_ENTRIES;
}

/* Rows, columns and sides whose products below cannot wrap. */
static int good_matrix(int64_t rows, int64_t cols)
{
    return cols <= (int64_t)1 << 30 && (rows == 0 || cols <= ((int64_t)1 << 50) / rows);
}

#define KERNEL(name) static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t count)
#define BUFFER(k) (call.view[k].buf)
#define RUN(statement)           \
    Py_BEGIN_ALLOW_THREADS       \
    statement;                   \
    Py_END_ALLOW_THREADS         \
    release(&call);              \
    Py_RETURN_NONE

KERNEL(encode) /* path, vectors, codebooks, widths (int32), codes; count, stages, entries */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "rrrw", 3)) return NULL;
    int64_t n = call.number[0], stages = call.number[1], entries = call.number[2];
    if (!in_range(&call, good_codebooks(stages, entries))) return NULL;
    int64_t bytes[] = {n * DIMENSION * 4, stages * entries * DIMENSION * 4, stages * 4, n * stages};
    if (!has_bytes(&call, bytes)) return NULL;
    int widths[MAX_STAGES] = {0}, good = 1;
    for (int stage = 0; stage < stages; stage++) {
        widths[stage] = ((const int32_t *)BUFFER(2))[stage];
        good &= widths[stage] >= 1 && widths[stage] <= MAX_WIDTH;
    }
    if (!in_range(&call, good)) return NULL;
    size_t needed = (call.path->search_bytes() + 63) / 64 * 64;
    char *memory = malloc(needed + 64); /* aligned by hand: not every C library has aligned_alloc */
    if (!memory) {
        release(&call);
        return PyErr_NoMemory();
    }
    void *aligned = memory + (64 - (uintptr_t)memory % 64);
    Py_BEGIN_ALLOW_THREADS
    call.path->encode(aligned, BUFFER(0), n, BUFFER(1), (int)stages, (int)entries, widths, BUFFER(3));
    Py_END_ALLOW_THREADS
    free(memory);
    release(&call);
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
    if (!take(&call, args, count, "rrwww", 3)) return NULL;
    int64_t n = call.number[0], stages = call.number[1], entries = call.number[2];
    if (!in_range(&call, good_codebooks(stages, entries))) return NULL;
    int64_t bytes[] = {n * DIMENSION * 4, n * stages, stages * (stages - 1) / 2 * entries * entries * 4,
                       stages * entries * 4, stages * entries * DIMENSION * 8};
    if (!has_bytes(&call, bytes) || !in_range(&call, codes_below(BUFFER(1), n * stages, entries))) return NULL;
    RUN(call.path->fit_counts(BUFFER(0), BUFFER(1), n, (int)stages, (int)entries, BUFFER(2), BUFFER(3), BUFFER(4)));
}

KERNEL(fit_moments) /* path, vectors, weights, codes, pairs, totals, sums; count, stages, entries */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "rrrwww", 3)) return NULL;
    int64_t n = call.number[0], stages = call.number[1], entries = call.number[2];
    if (!in_range(&call, good_codebooks(stages, entries))) return NULL;
    int64_t cell = DIMENSION * 8;
    int64_t bytes[] = {n * DIMENSION * 4, n * DIMENSION * 4, n * stages,
                       stages * (stages - 1) / 2 * entries * entries * cell, stages * entries * cell,
                       stages * entries * cell};
    if (!has_bytes(&call, bytes) || !in_range(&call, codes_below(BUFFER(2), n * stages, entries))) return NULL;
    RUN(call.path->fit_moments(BUFFER(0), BUFFER(1), BUFFER(2), n, (int)stages, (int)entries, BUFFER(3), BUFFER(4),
                               BUFFER(5)));
}

KERNEL(sweep_counts) /* path, codebooks, pairs, totals, sums; stages, entries, sweeps */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "wrrr", 3)) return NULL;
    int64_t stages = call.number[0], entries = call.number[1], sweeps = call.number[2];
    if (!in_range(&call, good_codebooks(stages, entries) && sweeps <= 1000)) return NULL;
    int64_t bytes[] = {stages * entries * DIMENSION * 8, stages * (stages - 1) / 2 * entries * entries * 4,
                       stages * entries * 4, stages * entries * DIMENSION * 8};
    if (!has_bytes(&call, bytes)) return NULL;
    RUN(call.path->sweep_counts(BUFFER(0), (int)stages, (int)entries, BUFFER(1), BUFFER(2), BUFFER(3), (int)sweeps));
}

KERNEL(sweep_moments) /* path, codebooks, pairs, totals, sums; stages, entries, sweeps */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "wrrr", 3)) return NULL;
    int64_t stages = call.number[0], entries = call.number[1], sweeps = call.number[2];
    if (!in_range(&call, good_codebooks(stages, entries) && sweeps <= 1000)) return NULL;
    int64_t codebooks = stages * entries * DIMENSION * 8;
    int64_t bytes[] = {codebooks, stages * (stages - 1) / 2 * entries * entries * DIMENSION * 8, codebooks, codebooks};
    if (!has_bytes(&call, bytes)) return NULL;
    RUN(call.path->sweep_moments(BUFFER(0), (int)stages, (int)entries, BUFFER(1), BUFFER(2), BUFFER(3), (int)sweeps));
}

KERNEL(decode_rvq) /* path, codes, codebooks, scales, values; rows, cols, stages, entries */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "rrrw", 4)) return NULL;
    int64_t rows = call.number[0], cols = call.number[1], stages = call.number[2], entries = call.number[3];
    if (!in_range(&call, good_codebooks(stages, entries) && good_matrix(rows, cols))) return NULL;
    int64_t blocks = (rows + 63) / 64, vectors = (cols + DIMENSION - 1) / DIMENSION;
    int64_t bytes[] = {blocks * vectors * stages * 64, stages * entries * DIMENSION * 4, rows * 4, rows * cols * 4};
    if (!has_bytes(&call, bytes)) return NULL;
    RUN(call.path->decode_rvq(BUFFER(0), BUFFER(1), BUFFER(2), rows, cols, (int)stages, (int)entries, BUFFER(3)));
}

/* path, from, to; rows, vectors, stages */
static PyObject *reorder(PyObject *const *args, Py_ssize_t count, int pack)
{
    struct call call;
    if (!take(&call, args, count, "rw", 3)) return NULL;
    int64_t rows = call.number[0], vectors = call.number[1], stages = call.number[2];
    if (!in_range(&call, good_codebooks(stages, 1) && good_matrix(rows, vectors))) return NULL;
    int64_t plain = rows * vectors * stages, packed = (rows + 63) / 64 * vectors * stages * 64;
    int64_t bytes[] = {pack ? plain : packed, pack ? packed : plain};
    if (!has_bytes(&call, bytes)) return NULL;
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
    if (!take(&call, args, count, "rrrrw", 2)) return NULL;
    int64_t rows = call.number[0], cols = call.number[1];
    if (!in_range(&call, good_matrix(rows, cols))) return NULL;
    int64_t bytes[] = {rows * ((cols + 1) / 2), rows * ((cols + 31) / 32), 256 * 2 * 4, 256 * 4, rows * cols * 4};
    if (!has_bytes(&call, bytes)) return NULL;
    RUN(call.path->decode_mxfp4(BUFFER(0), BUFFER(1), BUFFER(2), BUFFER(3), rows, cols, BUFFER(4)));
}

KERNEL(decode_group_int) /* path, codes, factors, values; rows, cols, bits, group */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "rrw", 4)) return NULL;
    int64_t rows = call.number[0], cols = call.number[1], bits = call.number[2], group = call.number[3];
    int good = good_matrix(rows, cols) && (bits == 4 || bits == 8) && group >= 2 && group <= 1024 && group % 2 == 0;
    if (!in_range(&call, good)) return NULL;
    int64_t bytes[] = {rows * (bits == 8 ? cols : (cols + 1) / 2), rows * ((cols + group - 1) / group) * 4,
                       rows * cols * 4};
    if (!has_bytes(&call, bytes)) return NULL;
    RUN(call.path->decode_group_int(BUFFER(0), BUFFER(1), rows, cols, (int)bits, group, BUFFER(2)));
}

KERNEL(fit_group_int) /* path, values, scales; rows, cols, bits, group, exponent + 128 */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "rw", 5)) return NULL;
    int64_t rows = call.number[0], cols = call.number[1], bits = call.number[2], group = call.number[3];
    int64_t exponent = call.number[4] - 128;
    int good = good_matrix(rows, cols) && (bits == 4 || bits == 8) && group >= 2 && group <= 1024 && group % 2 == 0;
    if (!in_range(&call, good && exponent >= -100 && exponent <= 100)) return NULL;
    int64_t bytes[] = {rows * cols * 4, rows * ((cols + group - 1) / group) * 2};
    if (!has_bytes(&call, bytes)) return NULL;
    RUN(call.path->fit_group_int(BUFFER(0), rows, cols, (int)bits, group, (int)exponent, BUFFER(1)));
}

KERNEL(row_sums) /* path, a, b, weights (or an empty buffer), sums; rows, cols */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "rrrw", 2)) return NULL;
    int64_t rows = call.number[0], cols = call.number[1];
    if (!in_range(&call, good_matrix(rows, cols))) return NULL;
    int64_t weights = call.view[2].len ? cols * 4 : 0;
    int64_t bytes[] = {rows * cols * 4, rows * cols * 4, weights, rows * 4 * 8};
    if (!has_bytes(&call, bytes)) return NULL;
    RUN(call.path->row_sums(BUFFER(0), BUFFER(1), weights ? BUFFER(2) : NULL, rows, cols, BUFFER(3)));
}

KERNEL(half_to_single) /* path, from, to; count */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "rw", 1)) return NULL;
    int64_t bytes[] = {call.number[0] * 2, call.number[0] * 4};
    if (!has_bytes(&call, bytes)) return NULL;
    RUN(call.path->half_to_single(BUFFER(0), call.number[0], BUFFER(1)));
}

KERNEL(single_to_half) /* path, from, to; count */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "rw", 1)) return NULL;
    int64_t bytes[] = {call.number[0] * 4, call.number[0] * 2};
    if (!has_bytes(&call, bytes)) return NULL;
    RUN(call.path->single_to_half(BUFFER(0), call.number[0], BUFFER(1)));
}

KERNEL(bfloat16_to_single) /* path, from, to; count */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "rw", 1)) return NULL;
    int64_t bytes[] = {call.number[0] * 2, call.number[0] * 4};
    if (!has_bytes(&call, bytes)) return NULL;
    RUN(call.path->bfloat16_to_single(BUFFER(0), call.number[0], BUFFER(1)));
}

KERNEL(peak) /* path, one float32; rounds. Returns the number of multiply-adds. */
{
    (void)self;
    struct call call;
    if (!take(&call, args, count, "w", 1)) return NULL;
    int64_t bytes[] = {4}, done;
    if (!has_bytes(&call, bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = call.path->peak(call.number[0], BUFFER(0));
    Py_END_ALLOW_THREADS
    release(&call);
    return PyLong_FromLongLong(done);
}

static PyObject *available(PyObject *self, PyObject *none)
{
    (void)self;
    (void)none;
    PyObject *found = PyList_New(0);
    for (int k = 0; found && k < PATHS; k++) {
        if (!runs_here(paths[k])) continue;
        PyObject *item = Py_BuildValue("(si)", paths[k]->name, k);
        if (!item || PyList_Append(found, item) < 0) Py_CLEAR(found);
        Py_XDECREF(item);
    }
    return found;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    {"available", available, METH_NOARGS, "Paths that run here, best first: a list of (name, number)."},
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

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Compiled kernels; use formats.kernels.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }

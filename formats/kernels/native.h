/* What the files of the module formats.kernels._native share: taking arguments and checking lengths.
 *
 * Functions take the number of a path, then buffers, then integers. Shapes and dtypes are the business of the Python
 * wrappers; what is checked here is that no kernel can leave a buffer. */
#ifndef MOEPACK_NATIVE_H
#define MOEPACK_NATIVE_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"
#include "rvq_grid.h"

#define MAX_BUFFERS 8
#define MAX_NUMBERS 12

struct call {
    const struct kernels *path;
    Py_buffer view[MAX_BUFFERS];
    int views;
    int64_t number[MAX_NUMBERS];
};

/* Take the arguments: `buffers` has an 'r' or 'w' for each buffer, and `numbers` integers from 0 up follow. On failure
 * an exception is set, nothing is held, and 0 is returned. */
int moepack_take(struct call *call, PyObject *const *args, Py_ssize_t count, const char *buffers, int numbers);

void moepack_release(struct call *call);

/* Whether each buffer has as many bytes as stated; if not, an exception is set and all are released. */
int moepack_has_bytes(struct call *call, const int64_t *bytes);

/* Whether a condition on the numbers holds; if not, an exception is set and all are released. */
int moepack_in_range(struct call *call, int good);

PyObject *moepack_available(PyObject *self, PyObject *none);

extern PyMethodDef moepack_product_methods[]; /* of native_products.c */

static inline int good_codebooks(int64_t stages, int64_t entries)
{
    return stages >= 1 && stages <= MAX_STAGES && entries >= 1 && entries <= MAX_ENTRIES;
}

/* Rows, columns and sides whose products below cannot wrap. */
static inline int good_matrix(int64_t rows, int64_t cols)
{
    return cols <= (int64_t)1 << 30 && (rows == 0 || cols <= ((int64_t)1 << 50) / rows);
}

#define KERNEL(name) static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t count)
#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
#define BUFFER(k) (call.view[k].buf)

#endif

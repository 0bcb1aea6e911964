/* Paths of the module formats.kernels._native, and how its functions take their arguments. */
#include "native.h"

#include <string.h>
#ifdef MOEPACK_X86
#include <cpuid.h>
#endif

static const struct kernels *const paths[] = {
#ifdef MOEPACK_X86
    &moepack_avx512_vnni, &moepack_avx512, &moepack_avx2,
#endif
    &moepack_portable,
};
#define PATHS ((int)(sizeof paths / sizeof paths[0]))

#ifdef MOEPACK_X86
static int has_f16c(void) /* older compilers do not know its name */
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

static int runs_here(const struct kernels *path)
{
#ifdef MOEPACK_X86
    __builtin_cpu_init();
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (path == &moepack_avx512_vnni) return wide && __builtin_cpu_supports("avx512vnni");
    if (path == &moepack_avx512) return wide;
    if (path == &moepack_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#endif
    return path == &moepack_portable;
}

void moepack_release(struct call *call)
{
    while (call->views > 0) PyBuffer_Release(&call->view[--call->views]);
}

int moepack_take(struct call *call, PyObject *const *args, Py_ssize_t count, const char *buffers, int numbers)
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
            moepack_release(call);
            return 0;
        }
        call->views = k + 1;
    }
    return 1;
}

int moepack_has_bytes(struct call *call, const int64_t *bytes)
{
    for (int k = 0; k < call->views; k++) {
        if (call->view[k].len != bytes[k]) {
            PyErr_Format(PyExc_ValueError, "buffer %d has another length than the shapes say", k);
            moepack_release(call);
            return 0;
        }
    }
    return 1;
}

int moepack_in_range(struct call *call, int good)
{
    if (!good) {
        PyErr_SetString(PyExc_ValueError, "parameter out of range");
        moepack_release(call);
    }
    return good;
}

PyObject *moepack_available(PyObject *self, PyObject *none)
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

/* The launches of a tape, one after another. launch.py packs what they are given, and says how. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MOST_BASES = 256, MOST_BYTES = 4096, BUFFER = 1, SIZE = 2 }; /* CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE */

typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                      void **);
typedef struct {
    int64_t function, x, y, z, threads, shared, bytes, cells;
} Kernel;
typedef struct {
    int64_t at, base, offset;
} Cell;

static int run(Launch launch, const char *packed, const char *end, const uint64_t *bases, void *stream) {
    int64_t buffer[MOST_BYTES / 8];
    while (packed < end) {
        const Kernel *kernel = (const Kernel *)packed;
        const Cell *cells = (const Cell *)(packed + sizeof(Kernel));
        const char *arguments = (const char *)(cells + kernel->cells);
        size_t size = kernel->bytes;
        memcpy(buffer, arguments, size);
        for (int64_t i = 0; i < kernel->cells; i++)
            *(uint64_t *)((char *)buffer + cells[i].at) = bases[cells[i].base] + cells[i].offset;
        void *extra[] = {(void *)BUFFER, buffer, (void *)SIZE, &size, NULL};
        int code = launch((void *)kernel->function, kernel->x, kernel->y, kernel->z, kernel->threads, 1, 1,
                          kernel->shared, stream, NULL, extra);
        if (code)
            return code;
        packed = arguments + (size + 7) / 8 * 8;
    }
    return 0;
}

static PyObject *play(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4 || !PyBytes_CheckExact(args[1]) || !PyList_CheckExact(args[2]) ||
        PyList_GET_SIZE(args[2]) > MOST_BASES) {
        PyErr_SetString(PyExc_TypeError, "play(launch, packed, bases, stream)");
        return NULL;
    }
    uint64_t bases[MOST_BASES];
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[2]); i++)
        bases[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(args[2], i));
    Launch launch = (Launch)PyLong_AsVoidPtr(args[0]);
    void *stream = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred())
        return NULL;
    const char *packed = PyBytes_AS_STRING(args[1]), *end = packed + PyBytes_GET_SIZE(args[1]);
    int code;
    Py_BEGIN_ALLOW_THREADS; /* a full queue waits for the device, which may wait for another thread */
    code = run(launch, packed, end, bases, stream);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(code);
}

static PyMethodDef methods[] = {{"play", (PyCFunction)(void (*)(void))play, METH_FASTCALL, NULL}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "lln_play", NULL, -1, methods};
PyMODINIT_FUNC PyInit_lln_play(void) { return PyModule_Create(&module); }

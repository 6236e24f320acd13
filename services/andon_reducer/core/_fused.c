/* The weighted mean of float32 vectors in one pass, and whether all of it is finite.

   Bit for bit what mean.py defines and does with NumPy, in one pass over memory and not four: for
   each element acc = c[0] * g[0], then acc = acc + c[r] * g[r], every product and every sum rounded
   to float32. The build forbids contracting a product and a sum into one rounding.

   The module is optional: without it, NumPy does the same. Vectors need no alignment. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

/* Floats of one cache line. */
#define LINE 16

/* So many bytes of a vector are asked for before they are needed. */
#define AHEAD 1024
#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address) ((void)(address))
#endif

/* Writes a line. Past the caches, if so asked and `to` is aligned: a line that nobody reads soon
   need not be fetched to be written. */
static inline void put_line(float *to, const float *line, int past_caches)
{
#if defined(__SSE__)
    if (past_caches) {
        for (int j = 0; j < LINE; j += 4)
            _mm_stream_ps(to + j, _mm_loadu_ps(line + j));
        return;
    }
#else
    (void)past_caches;
#endif
    memcpy(to, line, LINE * sizeof(float));
}

/* The mean of `count` vectors of `size` elements. Returns whether every element of it is finite:
   x - x is 0 then, and else NaN, which a sum keeps. */
static int mean(char *out, char *const *vectors, const float *shares, Py_ssize_t count,
                Py_ssize_t size, int past_caches)
{
    float bad[LINE] = {0};
    Py_ssize_t i = 0;
    for (; i + LINE <= size; i += LINE) {
        float acc[LINE], term[LINE];
        FETCH(vectors[0] + i * sizeof(float) + AHEAD);
        memcpy(acc, vectors[0] + i * sizeof(float), sizeof acc);
        for (int j = 0; j < LINE; j++)
            acc[j] = shares[0] * acc[j];
        for (Py_ssize_t r = 1; r < count; r++) {
            FETCH(vectors[r] + i * sizeof(float) + AHEAD);
            memcpy(term, vectors[r] + i * sizeof(float), sizeof term);
            for (int j = 0; j < LINE; j++)
                term[j] = shares[r] * term[j];
            for (int j = 0; j < LINE; j++)
                acc[j] = acc[j] + term[j];
        }
        for (int j = 0; j < LINE; j++)
            bad[j] += acc[j] - acc[j];
        put_line((float *)(void *)(out + i * sizeof(float)), acc, past_caches);
    }
    for (; i < size; i++) {
        float acc, term;
        memcpy(&acc, vectors[0] + i * sizeof(float), sizeof acc);
        acc = shares[0] * acc;
        for (Py_ssize_t r = 1; r < count; r++) {
            memcpy(&term, vectors[r] + i * sizeof(float), sizeof term);
            term = shares[r] * term;
            acc = acc + term;
        }
        bad[0] += acc - acc;
        memcpy(out + i * sizeof(float), &acc, sizeof acc);
    }
#if defined(__SSE__)
    _mm_sfence();
#endif
    int finite = 1;
    for (int j = 0; j < LINE; j++)
        finite &= bad[j] == 0.0f;
    return finite;
}

PyDoc_STRVAR(weighted_mean_doc,
"weighted_mean(out, vectors, shares, past_caches, /)\n--\n\n"
"Writes the sum of share * vector, in order, to `out`; whether every element is finite.\n\n"
"`out` and `vectors` are buffers of equally many bytes of float32, `shares` floats that float32\n"
"holds. `past_caches`: nobody reads `out` soon. The GIL is released meanwhile.\n\n"
"Raises:\n    ValueError: they do not fit each other.\n");

static PyObject *weighted_mean(PyObject *module, PyObject *args)
{
    PyObject *out_object, *vector_objects, *share_objects, *answer = NULL;
    int past_caches, finite;
    Py_buffer out = {0};
    Py_ssize_t count, held = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!O!p:weighted_mean", &out_object, &PyTuple_Type, &vector_objects,
                          &PyTuple_Type, &share_objects, &past_caches))
        return NULL;
    count = PyTuple_Size(vector_objects);
    if (count == 0 || PyTuple_Size(share_objects) != count) {
        PyErr_SetString(PyExc_ValueError, "there must be vectors, and one share for each");
        return NULL;
    }
    if (PyObject_GetBuffer(out_object, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return NULL;
    Py_buffer *views = PyMem_Calloc((size_t)count, sizeof *views);
    char **vectors = PyMem_Calloc((size_t)count, sizeof *vectors);
    float *shares = PyMem_Calloc((size_t)count, sizeof *shares);
    if (views == NULL || vectors == NULL || shares == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; held < count; held++) {
        double share = PyFloat_AsDouble(PyTuple_GetItem(share_objects, held));
        if (share == -1.0 && PyErr_Occurred())
            goto done;
        if (PyObject_GetBuffer(PyTuple_GetItem(vector_objects, held), &views[held],
                               PyBUF_C_CONTIGUOUS) < 0)
            goto done;
        shares[held] = (float)share;
        vectors[held] = views[held].buf;
        if (views[held].len != out.len || out.len % (Py_ssize_t)sizeof(float)) {
            held++;
            PyErr_SetString(PyExc_ValueError, "vectors and out must be of one length of float32");
            goto done;
        }
    }
    past_caches = past_caches && (uintptr_t)out.buf % LINE == 0;
    Py_BEGIN_ALLOW_THREADS
    finite = mean(out.buf, vectors, shares, count, out.len / (Py_ssize_t)sizeof(float),
                  past_caches);
    Py_END_ALLOW_THREADS
    answer = PyBool_FromLong(finite);
done:
    while (held-- > 0)
        PyBuffer_Release(&views[held]);
    PyMem_Free(shares);
    PyMem_Free(vectors);
    PyMem_Free(views);
    PyBuffer_Release(&out);
    return answer;
}

static PyMethodDef methods[] = {
    {"weighted_mean", weighted_mean, METH_VARARGS, weighted_mean_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_fused", "The weighted mean in one pass.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fused(void)
{
    return PyModuleDef_Init(&definition);
}

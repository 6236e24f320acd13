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

#if defined(__GNUC__) && defined(__x86_64__) && !defined(ANDON_PORTABLE)
#define HAS_AVX __builtin_cpu_supports("avx")
#include <immintrin.h>
#endif

/* Floats of one cache line. */
#define LINE 16

/* Elements `at` to `at` + `n` of the mean, at most a line. Adds x - x of each to `bad`: 0 if it is
   finite, else NaN. Inlined, so that the compiler knows `n`. */
static inline void mean_of_some(char *out, char *const *vectors, const float *shares,
                                Py_ssize_t count, Py_ssize_t at, int n, float *bad)
{
    float acc[LINE], term[LINE];
    memcpy(acc, vectors[0] + at * sizeof(float), n * sizeof(float));
    for (int j = 0; j < n; j++)
        acc[j] = shares[0] * acc[j];
    for (Py_ssize_t r = 1; r < count; r++) {
        memcpy(term, vectors[r] + at * sizeof(float), n * sizeof(float));
        for (int j = 0; j < n; j++)
            term[j] = shares[r] * term[j];
        for (int j = 0; j < n; j++)
            acc[j] = acc[j] + term[j];
    }
    memcpy(out + at * sizeof(float), acc, n * sizeof(float));
    for (int j = 0; j < n; j++)
        bad[j] += acc[j] - acc[j];
}

/* The mean of elements `from` to `to` of `count` vectors. Returns whether all of it is finite. */
static int mean(char *out, char *const *vectors, const float *shares, Py_ssize_t count,
                Py_ssize_t from, Py_ssize_t to)
{
    float bad[LINE] = {0};
    int finite = 1;
    for (; from + LINE <= to; from += LINE)
        mean_of_some(out, vectors, shares, count, from, LINE, bad);
    for (; from < to; from++)
        mean_of_some(out, vectors, shares, count, from, 1, bad);
    for (int j = 0; j < LINE; j++)
        finite &= bad[j] == 0;
    return finite;
}

#ifdef HAS_AVX

/* So many bytes of a vector are asked for before they are needed. */
#define AHEAD 1024

/* The same, for the first `size` elements, whole lines of them. `past_caches`: `out` lies at a
   line, and nobody reads it soon; a line that is written whole past the caches need not be read. */
__attribute__((target("avx"))) static int mean_of_lines(
    char *out, char *const *vectors, const float *shares, Py_ssize_t count, Py_ssize_t size,
    int past_caches)
{
    __m256 bad = _mm256_setzero_ps();
    for (Py_ssize_t at = 0; at < size * (Py_ssize_t)sizeof(float); at += LINE * sizeof(float)) {
        _mm_prefetch(vectors[0] + at + AHEAD, _MM_HINT_T0);
        __m256 share = _mm256_set1_ps(shares[0]);
        __m256 low = _mm256_mul_ps(share, _mm256_loadu_ps((void *)(vectors[0] + at)));
        __m256 high = _mm256_mul_ps(share, _mm256_loadu_ps((void *)(vectors[0] + at + 32)));
        for (Py_ssize_t r = 1; r < count; r++) {
            const char *line = vectors[r] + at;
            _mm_prefetch(line + AHEAD, _MM_HINT_T0);
            share = _mm256_set1_ps(shares[r]);
            low = _mm256_add_ps(low, _mm256_mul_ps(share, _mm256_loadu_ps((void *)line)));
            high = _mm256_add_ps(high, _mm256_mul_ps(share, _mm256_loadu_ps((void *)(line + 32))));
        }
        bad = _mm256_add_ps(bad, _mm256_sub_ps(low, low));
        bad = _mm256_add_ps(bad, _mm256_sub_ps(high, high));
        if (past_caches) {
            _mm256_stream_ps((void *)(out + at), low);
            _mm256_stream_ps((void *)(out + at + 32), high);
        } else {
            _mm256_storeu_ps((void *)(out + at), low);
            _mm256_storeu_ps((void *)(out + at + 32), high);
        }
    }
    _mm_sfence();
    return _mm256_movemask_ps(_mm256_cmp_ps(bad, bad, _CMP_UNORD_Q)) == 0;
}

#endif

PyDoc_STRVAR(weighted_mean_doc,
"weighted_mean(out, vectors, shares, past_caches, /)\n--\n\n"
"Writes the sum of share * vector, in order, to `out`; whether every element is finite.\n\n"
"`out` and `vectors` are buffers of equally many bytes of float32, `shares` floats that float32\n"
"holds. `past_caches`: nobody reads `out` soon. The GIL is released meanwhile.\n\n"
"Raises:\n    ValueError: they do not fit each other.\n");

static PyObject *weighted_mean(PyObject *module, PyObject *args)
{
    PyObject *out_object, *vector_objects, *share_objects, *answer = NULL;
    int past_caches, finite = 1;
    Py_buffer out = {0};
    Py_ssize_t count, size, lines = 0, held = 0;
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
    size = out.len / (Py_ssize_t)sizeof(float);
    Py_BEGIN_ALLOW_THREADS
#ifdef HAS_AVX
    if (HAS_AVX) {
        lines = size - size % LINE;
        past_caches = past_caches && (uintptr_t)out.buf % (LINE * sizeof(float)) == 0;
        finite = mean_of_lines(out.buf, vectors, shares, count, lines, past_caches);
    }
#endif
    finite &= mean(out.buf, vectors, shares, count, lines, size);
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

/* Weighted means and narrow encodings, each in one pass over memory that also finds values that are
   not finite.

   Gives the same bits as andon_reducer.core.mean and andon.protocol.encoding, which define the
   results and compute them with NumPy in several passes. A mean is, for each element,
   acc = c[0] * g[0], then acc = acc + c[r] * g[r], with every product and every sum rounded to
   float32. So a compiler must not contract the two into one rounding (-ffp-contract=off), and no
   function here may use a fused multiply-add.

   Collectives of processes that share memory are in _neighbours.h, and alone have no counterpart in
   NumPy: without them, processes use TCP.

   The module is optional: without it, NumPy does the same. Vectors need no alignment, but those of
   the trimmed mean: all loads and stores go through memcpy or unaligned instructions. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__) && !defined(ANDON_PORTABLE)
#define HAS_AVX __builtin_cpu_supports("avx")
#define HAS_AVX2 __builtin_cpu_supports("avx2")
#include <immintrin.h>
#endif

/* Floats in one cache line. */
#define LINE 16

/* Elements `at` to `at` + `n` of the mean, at most one line. Adds x - x of each element x to `bad`:
   that is 0 if x is finite, else NaN, and a NaN stays. Inlined, so that the compiler knows `n`. */
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

/* How many bytes ahead of its use a vector is prefetched. */
#define AHEAD 1024

/* The same for the first `size` elements, which must be whole lines. With `past_caches` the result
   is written around the caches: a line that is written whole this way need not be read first. `out`
   must start at a line then, and nobody should read it soon. The products and sums of a line are
   those of `mean_of_some`, in the same order. */
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
    /* Streaming stores are not ordered with other stores: without this, another thread could see
       the job done before it sees the mean. */
    _mm_sfence();
    return _mm256_movemask_ps(_mm256_cmp_ps(bad, bad, _CMP_UNORD_Q)) == 0;
}

#endif

/* bfloat16 is the upper half of a float32, rounded to nearest even. */

/* The greatest float32, as bits without a sign, that is still finite once it is rounded. */
#define GREATEST 0x7F7F7FFFu

static inline uint16_t rounded(uint32_t bits)
{
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

/* Rounds `n` float32 to bfloat16. Returns whether all are finite, before and after rounding: as
   bits without a sign, infinities and NaNs are above every finite value. */
static int narrow(char *out, const char *values, Py_ssize_t n)
{
    uint32_t beyond = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t bits;
        uint16_t half;
        memcpy(&bits, values + i * sizeof bits, sizeof bits);
        half = rounded(bits);
        beyond |= (bits & 0x7FFFFFFFu) > GREATEST;
        memcpy(out + i * sizeof half, &half, sizeof half);
    }
    return !beyond;
}

/* The mean of `count` bfloat16 vectors, rounded to bfloat16. Returns whether it is finite. */
static int narrow_mean(char *out, char *const *vectors, const float *shares, Py_ssize_t count,
                       Py_ssize_t size)
{
    enum { SOME = 1024 };  /* So few that the sums stay in the first-level cache. */
    float acc[SOME];
    int finite = 1;
    for (Py_ssize_t at = 0; at < size; at += SOME) {
        Py_ssize_t n = size - at < SOME ? size - at : SOME;
        for (Py_ssize_t r = 0; r < count; r++) {
            const char *halves = vectors[r] + at * sizeof(uint16_t);
            float share = shares[r];
            for (Py_ssize_t j = 0; j < n; j++) {
                uint16_t half;
                uint32_t bits;
                float number;
                memcpy(&half, halves + j * sizeof half, sizeof half);
                bits = (uint32_t)half << 16;
                memcpy(&number, &bits, sizeof number);
                number = share * number;
                acc[j] = r == 0 ? number : acc[j] + number;
            }
        }
        finite &= narrow(out + at * sizeof(uint16_t), (const char *)acc, n);
    }
    return finite;
}

#include "_strips.h"
#include "_tree.h"
#include "_trimmed.h"

/* The arguments of the means. */
typedef struct {
    Py_buffer out, *views;
    char **vectors;
    float *shares;
    Py_ssize_t count, held;
} Arguments;

/* Releases what `hold` took, all of it or the part before an error. */
static void release(Arguments *given)
{
    while (given->held > 0)
        PyBuffer_Release(&given->views[--given->held]);
    PyMem_Free(given->shares);
    PyMem_Free(given->vectors);
    PyMem_Free(given->views);
    PyBuffer_Release(&given->out);
}

/* Takes the buffers, and the shares unless those are NULL. The vectors have `length` bytes each; if
   that is -1, as many as `out`, which then must be whole items of `itemsize`. On an error returns
   -1 with an exception set, and holds nothing. All checks are done before a pass, since passes run
   without the GIL and can't raise. */
static int hold(Arguments *given, PyObject *out, PyObject *vectors, PyObject *shares,
                Py_ssize_t length, Py_ssize_t itemsize)
{
    memset(given, 0, sizeof *given);
    given->count = PyTuple_Size(vectors);
    if (given->count == 0 || (shares != NULL && PyTuple_Size(shares) != given->count)) {
        PyErr_SetString(PyExc_ValueError, "there must be vectors, and one share for each");
        return -1;
    }
    if (PyObject_GetBuffer(out, &given->out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return -1;
    given->views = PyMem_Calloc((size_t)given->count, sizeof *given->views);
    given->vectors = PyMem_Calloc((size_t)given->count, sizeof *given->vectors);
    given->shares = PyMem_Calloc((size_t)given->count, sizeof *given->shares);
    if (given->views == NULL || given->vectors == NULL || given->shares == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t r = 0; r < given->count; r++) {
        double share = shares == NULL ? 1.0 : PyFloat_AsDouble(PyTuple_GetItem(shares, r));
        if (share == -1.0 && PyErr_Occurred())
            goto fail;
        if (PyObject_GetBuffer(PyTuple_GetItem(vectors, r), &given->views[r],
                               PyBUF_C_CONTIGUOUS) < 0)
            goto fail;
        given->held++;
        given->shares[r] = (float)share;
        given->vectors[r] = given->views[r].buf;
        if (given->views[r].len != (length < 0 ? given->out.len : length)
            || given->out.len % itemsize) {
            PyErr_SetString(PyExc_ValueError, length < 0
                            ? "vectors and out must be of one length, in whole items"
                            : "a vector is not as long as its elements");
            goto fail;
        }
    }
    return 0;
fail:
    release(given);
    return -1;
}

PyDoc_STRVAR(weighted_mean_doc,
"weighted_mean(out, vectors, shares, past_caches, /)\n--\n\n"
"Writes the sum of share * vector, in order, to `out`. Returns whether all of it is finite.\n\n"
"`out` and `vectors` are float32 buffers of the same length; each share must be a float32 value.\n"
"Set `past_caches` if nobody reads `out` soon. The GIL is released meanwhile.\n\n"
"Raises:\n    ValueError: the lengths do not match.\n");

static PyObject *weighted_mean(PyObject *module, PyObject *args)
{
    PyObject *out, *vectors, *shares;
    Arguments given;
    Py_ssize_t size, lines = 0;
    int past_caches, finite = 1;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!O!p:weighted_mean", &out, &PyTuple_Type, &vectors,
                          &PyTuple_Type, &shares, &past_caches)
        || hold(&given, out, vectors, shares, -1, sizeof(float)) < 0)
        return NULL;
    size = given.out.len / (Py_ssize_t)sizeof(float);
    Py_BEGIN_ALLOW_THREADS
#ifdef HAS_AVX
    if (HAS_AVX) {
        lines = size - size % LINE;
        /* Streaming stores need an aligned address. */
        past_caches = past_caches && (uintptr_t)given.out.buf % (LINE * sizeof(float)) == 0;
        finite = mean_of_lines(given.out.buf, given.vectors, given.shares, given.count, lines,
                               past_caches);
    }
#endif
    /* The rest of a line, or everything where there is no AVX. */
    finite &= mean(given.out.buf, given.vectors, given.shares, given.count, lines, size);
    Py_END_ALLOW_THREADS
    release(&given);
    return PyBool_FromLong(finite);
}

/* Checks the number of sums after each of `count` vectors: they leave the root alone. */
static int check_sums(const unsigned char *sums, Py_ssize_t length, Py_ssize_t count)
{
    int waiting = 0, deepest = 0, fits = length == count;
    for (Py_ssize_t r = 0; fits && r < count; r++) {
        deepest = ++waiting > deepest ? waiting : deepest;
        fits = sums[r] < waiting && deepest <= TREE_DEPTH;
        waiting -= sums[r];
    }
    if (fits && waiting == 1)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the sums don't join all vectors, or are too deep");
    return -1;
}

PyDoc_STRVAR(trimmed_mean_doc,
"trimmed_mean(out, values, shares, cut, /)\n--\n\n"
"Writes the trimmed mean to `out`. Returns whether all contributions are finite; if not, use\n"
"nothing.\n\n"
"`values` has a row of float32 for each share, of one length; `out` gets its first elements' mean,\n"
"as many as it has room for. Of each `cut` contributions are left out at each end. The GIL is\n"
"released meanwhile.\n\n"
"Raises:\n    ValueError: the lengths do not match, a buffer is not aligned to float32, or nothing\n"
"    would be kept.\n");

static PyObject *trimmed_mean(PyObject *module, PyObject *args)
{
    PyObject *out_object, *values_object, *shares_object, *answer = NULL;
    Py_buffer out, values;
    TrimmedMean mean = {0};
    double *shares = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO!n:trimmed_mean", &out_object, &values_object, &PyTuple_Type,
                          &shares_object, &mean.cut)
        || PyObject_GetBuffer(out_object, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(values_object, &values, PyBUF_C_CONTIGUOUS) < 0) {
        PyBuffer_Release(&out);
        return NULL;
    }
    mean.count = PyTuple_Size(shares_object);
    mean.size = out.len / (Py_ssize_t)sizeof(float);
    if (mean.count > 0)
        mean.stride = values.len / (Py_ssize_t)sizeof(float) / mean.count;
    if (mean.cut < 0 || mean.cut >= (mean.count + 1) / 2 || mean.size > mean.stride
        || out.len % (Py_ssize_t)sizeof(float)
        || values.len != mean.count * mean.stride * (Py_ssize_t)sizeof(float)
        || (uintptr_t)out.buf % sizeof(float) || (uintptr_t)values.buf % sizeof(float)) {
        PyErr_SetString(PyExc_ValueError,
                        "rows and out do not match, are not aligned, or nothing would be kept");
        goto done;
    }
    shares = PyMem_Calloc((size_t)mean.count, sizeof *shares);
    mean.places = PyMem_Calloc((size_t)mean.count, TRIM_STRIP * sizeof *mean.places);
    if (shares == NULL || mean.places == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t r = 0; r < mean.count; r++) {
        shares[r] = PyFloat_AsDouble(PyTuple_GetItem(shares_object, r));
        if (shares[r] == -1.0 && PyErr_Occurred())
            goto done;
    }
    mean.out = out.buf;
    mean.values = values.buf;
    mean.shares = shares;
    {
        int finite;
        Py_BEGIN_ALLOW_THREADS
#ifdef HAS_AVX2
        finite = HAS_AVX2 ? trim_avx2(&mean) : trim_anywhere(&mean);
#else
        finite = trim_anywhere(&mean);
#endif
        Py_END_ALLOW_THREADS
        answer = PyBool_FromLong(finite);
    }
done:
    PyMem_Free(mean.places);
    PyMem_Free(shares);
    PyBuffer_Release(&values);
    PyBuffer_Release(&out);
    return answer;
}

PyDoc_STRVAR(tree_mean_doc,
"tree_mean(out, vectors, sums, divisor, past_caches, /)\n--\n\n"
"Writes the mean of nodes of a tree, which come in order. Returns whether all of it is finite.\n\n"
"`sums` has a byte for each vector: how many sums, each of the two parts that came last, are done\n"
"once it is there. The root is divided by `divisor`; if that is 0, multiplied by 0. The rest is as\n"
"for weighted_mean.\n\n"
"Raises:\n    ValueError: the lengths do not match, or the sums don't join all vectors.\n");

static PyObject *tree_mean(PyObject *module, PyObject *args)
{
    PyObject *out, *vectors, *each;
    Arguments given;
    TreeMean mean;
    char *sums;
    Py_ssize_t length;
    float divisor;
    int past_caches, finite;
    (void)module;
    /* No "y#": headers of 3.13 would make a module of it that 3.11 refuses. */
    if (!PyArg_ParseTuple(args, "OO!Sfp:tree_mean", &out, &PyTuple_Type, &vectors, &each, &divisor,
                          &past_caches)
        || PyBytes_AsStringAndSize(each, &sums, &length) < 0
        || check_sums((unsigned char *)sums, length, PyTuple_Size(vectors)) < 0
        || hold(&given, out, vectors, NULL, -1, sizeof(float)) < 0)
        return NULL;
    past_caches = past_caches && (uintptr_t)given.out.buf % (LINE * sizeof(float)) == 0;
    mean = (TreeMean){
        given.out.buf, given.vectors, (unsigned char *)sums, given.count, divisor, past_caches};
    Py_BEGIN_ALLOW_THREADS
    finite = tree_mean_of(&mean, given.out.len / (Py_ssize_t)sizeof(float));
    Py_END_ALLOW_THREADS
    release(&given);
    return PyBool_FromLong(finite);
}

PyDoc_STRVAR(bfloat16_mean_doc,
"bfloat16_mean(out, vectors, shares, /)\n--\n\n"
"Like weighted_mean for bfloat16: sums are float32, and the mean is rounded to bfloat16.\n");

static PyObject *bfloat16_mean(PyObject *module, PyObject *args)
{
    PyObject *out, *vectors, *shares;
    Arguments given;
    int finite;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!O!:bfloat16_mean", &out, &PyTuple_Type, &vectors,
                          &PyTuple_Type, &shares)
        || hold(&given, out, vectors, shares, -1, sizeof(uint16_t)) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    finite = narrow_mean(given.out.buf, given.vectors, given.shares, given.count,
                         given.out.len / (Py_ssize_t)sizeof(uint16_t));
    Py_END_ALLOW_THREADS
    release(&given);
    return PyBool_FromLong(finite);
}

PyDoc_STRVAR(to_bfloat16_doc,
"to_bfloat16(out, values, /)\n--\n\n"
"Rounds float32 `values` to bfloat16 in `out`, which is half as long. Returns whether all are\n"
"finite, before and after rounding; if not, do not use `out`. The GIL is released meanwhile.\n\n"
"Raises:\n    ValueError: the lengths do not match.\n");

static PyObject *to_bfloat16(PyObject *module, PyObject *args)
{
    PyObject *out_object, *values_object, *answer = NULL;
    Py_buffer out, values;
    int finite;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:to_bfloat16", &out_object, &values_object)
        || PyObject_GetBuffer(out_object, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(values_object, &values, PyBUF_C_CONTIGUOUS) == 0) {
        if (values.len % (Py_ssize_t)sizeof(float) || values.len != 2 * out.len) {
            PyErr_SetString(PyExc_ValueError, "out must be half as long as values of float32");
        } else {
            Py_BEGIN_ALLOW_THREADS
            finite = narrow(out.buf, values.buf, values.len / (Py_ssize_t)sizeof(float));
            Py_END_ALLOW_THREADS
            answer = PyBool_FromLong(finite);
        }
        PyBuffer_Release(&values);
    }
    PyBuffer_Release(&out);
    return answer;
}

/* The elements of a payload or of a vector must be so few that no length overflows. */
#define MOST_ELEMENTS (PY_SSIZE_T_MAX / 16)

/* Takes the buffer of contiguous bytes of `object`, which must have `length` of them. */
static int take(Py_buffer *view, PyObject *object, int flags, Py_ssize_t length, const char *what)
{
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | flags) < 0)
        return -1;
    if (view->len == length)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, and must have %zd", what, view->len, length);
    PyBuffer_Release(view);
    return -1;
}

/* One of three passes, for a number of bits. */
#define OF_BITS(bits, name) ((bits) == 8 ? name##_8 : (bits) == 4 ? name##_4 : name##_2)

static PyObject *to_strips(PyObject *args, int bits)
{
    PyObject *out_object, *values_object, *residual_object, *answer = NULL;
    Py_buffer out, values, residual;
    Py_ssize_t n;
    int fits, wanted;
    if (!PyArg_ParseTuple(args, "OOO", &out_object, &values_object, &residual_object)
        || PyObject_GetBuffer(values_object, &values, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    n = values.len / (Py_ssize_t)sizeof(float);
    wanted = residual_object != Py_None;
    if (values.len % (Py_ssize_t)sizeof(float) || n > MOST_ELEMENTS) {
        PyErr_SetString(PyExc_ValueError, "values must be whole float32");
        goto no_values;
    }
    if (take(&out, out_object, PyBUF_WRITABLE, payload_bytes(n, bits), "out") < 0)
        goto no_values;
    if (wanted && take(&residual, residual_object, PyBUF_WRITABLE, values.len, "residual") < 0)
        goto no_out;
    Py_BEGIN_ALLOW_THREADS
    fits = OF_BITS(bits, narrow)(out.buf, values.buf, wanted ? residual.buf : NULL, n);
    Py_END_ALLOW_THREADS
    answer = PyBool_FromLong(fits);
    if (wanted)
        PyBuffer_Release(&residual);
no_out:
    PyBuffer_Release(&out);
no_values:
    PyBuffer_Release(&values);
    return answer;
}

static PyObject *from_strips(PyObject *args, int bits)
{
    PyObject *out_object, *payload_object, *answer = NULL;
    Py_buffer out, payload;
    Py_ssize_t n, start, some;
    if (!PyArg_ParseTuple(args, "OOnn", &out_object, &payload_object, &n, &start)
        || PyObject_GetBuffer(out_object, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return NULL;
    some = out.len / (Py_ssize_t)sizeof(float);
    if (n < 0 || n > MOST_ELEMENTS || start < 0 || start % STRIP_OF(bits) || start > n
        || some > n - start || out.len % (Py_ssize_t)sizeof(float)) {
        PyErr_SetString(PyExc_ValueError, "out must be for elements that the payload has");
    } else if (take(&payload, payload_object, 0, payload_bytes(n, bits), "payload") == 0) {
        Py_BEGIN_ALLOW_THREADS
        OF_BITS(bits, widen)(out.buf, payload.buf, n, start, some);
        Py_END_ALLOW_THREADS
        PyBuffer_Release(&payload);
        answer = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&out);
    return answer;
}

static PyObject *strips_mean(PyObject *args, int bits)
{
    PyObject *out, *vectors, *shares;
    Arguments given;
    StripMean mean;
    Py_ssize_t n;
    int finite, wide;
    if (!PyArg_ParseTuple(args, "OO!O!np", &out, &PyTuple_Type, &vectors, &PyTuple_Type, &shares,
                          &n, &wide))
        return NULL;
    if (n < 0 || n > MOST_ELEMENTS) {
        PyErr_SetString(PyExc_ValueError, "so many elements do not exist");
        return NULL;
    }
    if (hold(&given, out, vectors, shares, payload_bytes(n, bits), 1) < 0)
        return NULL;
    if (given.out.len != (wide ? n * (Py_ssize_t)sizeof(float) : payload_bytes(n, bits))) {
        PyErr_SetString(PyExc_ValueError, "out is not as long as its elements");
        release(&given);
        return NULL;
    }
    mean = (StripMean){given.out.buf, given.vectors, given.shares, given.count, n, wide};
    Py_BEGIN_ALLOW_THREADS
    finite = OF_BITS(bits, mean)(&mean);
    Py_END_ALLOW_THREADS
    release(&given);
    return PyBool_FromLong(finite);
}

/* The functions for strips whose codes have so many bits. */
#define STRIP_FUNCTIONS(bits)                                                                      \
    PyDoc_STRVAR(to_int##bits##_doc,                                                               \
    "to_int" #bits "(out, values, residual, /)\n--\n\n"                                            \
    "Encodes float32 `values` to `out` as INT" #bits "_BLOCK. Returns whether all fit; if not, use\n" \
    "nothing. `residual` is None or a buffer as long as `values`, which gets what is lost.\n\n"    \
    "Raises:\n    ValueError: the lengths do not match.\n");                                       \
    static PyObject *to_int##bits(PyObject *module, PyObject *args)                                \
    {                                                                                              \
        (void)module;                                                                              \
        return to_strips(args, bits);                                                              \
    }                                                                                              \
    PyDoc_STRVAR(from_int##bits##_doc,                                                             \
    "from_int" #bits "(out, payload, count, start, /)\n--\n\n"                                     \
    "Decodes an INT" #bits "_BLOCK payload of `count` elements to the float32 of `out`, from\n"    \
    "`start` on.\n\n"                                                                              \
    "Raises:\n    ValueError: the lengths do not match, or `start` does not begin a strip.\n");    \
    static PyObject *from_int##bits(PyObject *module, PyObject *args)                              \
    {                                                                                              \
        (void)module;                                                                              \
        return from_strips(args, bits);                                                            \
    }                                                                                              \
    PyDoc_STRVAR(int##bits##_mean_doc,                                                             \
    "int" #bits "_mean(out, vectors, shares, count, wide, /)\n--\n\n"                              \
    "Like weighted_mean for INT" #bits "_BLOCK payloads of `count` elements; sums are float32.\n\n" \
    "`out` gets float32 if `wide`, else INT" #bits "_BLOCK. Returns whether all is finite, and fits.\n"); \
    static PyObject *int##bits##_mean(PyObject *module, PyObject *args)                            \
    {                                                                                              \
        (void)module;                                                                              \
        return strips_mean(args, bits);                                                            \
    }

STRIP_FUNCTIONS(8)
STRIP_FUNCTIONS(4)
STRIP_FUNCTIONS(2)

/* Their entries in the module's table. */
#define STRIP_METHODS(bits)                                                                        \
    {"to_int" #bits, to_int##bits, METH_VARARGS, to_int##bits##_doc},                              \
    {"from_int" #bits, from_int##bits, METH_VARARGS, from_int##bits##_doc},                        \
    {"int" #bits "_mean", int##bits##_mean, METH_VARARGS, int##bits##_mean_doc}

#ifdef __linux__
#include "_neighbours.h"
#endif

static PyMethodDef methods[] = {
    {"weighted_mean", weighted_mean, METH_VARARGS, weighted_mean_doc},
    {"tree_mean", tree_mean, METH_VARARGS, tree_mean_doc},
    {"trimmed_mean", trimmed_mean, METH_VARARGS, trimmed_mean_doc},
    {"bfloat16_mean", bfloat16_mean, METH_VARARGS, bfloat16_mean_doc},
    {"to_bfloat16", to_bfloat16, METH_VARARGS, to_bfloat16_doc},
    STRIP_METHODS(8),
    STRIP_METHODS(4),
    STRIP_METHODS(2),
#ifdef __linux__
    {"all_reduce", all_reduce, METH_VARARGS, all_reduce_doc},
    {"wait_word", wait_word, METH_VARARGS, wait_word_doc},
    {"set_word", set_word, METH_VARARGS, set_word_doc},
    {"copy", copy, METH_VARARGS, copy_doc},
    {"checked_copy", checked_copy, METH_VARARGS, checked_copy_doc},
    {"sum", sum_vectors, METH_VARARGS, sum_doc},
#endif
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_fused", "Weighted means and narrow encodings, in one pass each.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fused(void)
{
    return PyModuleDef_Init(&definition);
}

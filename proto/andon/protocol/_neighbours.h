/* Collectives of processes that have mapped each other's files: docs/protocol-sessions.md, section
   30. Part of _fused.c; Linux only, since processes wait by its futex.

   Each process writes its own file only. Its words say how many parts it has given and taken. A
   part lies in one of two slots, so a process is at most two parts ahead of the slowest one. Words
   are stored with release and loaded with acquire: who sees a word sees the part behind it. */

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Where a file has what. */
#define GIVEN 128
#define TAKEN 192
#define OVER 256
#define SLOTS 4096

#define MOST_NEIGHBOURS 64
/* Up to this many bytes an input is given whole to all. */
#define SMALL (64 * 1024)
/* How often a word is looked at before the process sleeps, and for how long at most it does. */
#define LOOKS 200
#define SLEEP_NS 100000000

typedef struct {
    Py_buffer views[MOST_NEIGHBOURS];
    char *files[MOST_NEIGHBOURS];
    PyObject *still;        /* Called while the process waits in vain; raises to end that. */
    PyThreadState *thread;  /* Ours, while the interpreter is released. */
    Py_ssize_t slot;        /* Bytes of a slot. */
    int count, me, held;
} Host;

static void let_go(Host *host)
{
    while (host->held > 0)
        PyBuffer_Release(&host->views[--host->held]);
}

/* Takes the files of all neighbours, the own one among them. On an error returns -1 with an
   exception set, and holds nothing. */
static int take_files(Host *host, PyObject *files, int me, PyObject *still)
{
    Py_ssize_t count = PyTuple_Size(files);
    memset(host, 0, sizeof *host);
    host->still = still;
    host->me = me;
    host->count = (int)count;
    if (count < 1 || count > MOST_NEIGHBOURS || me < 0 || me >= count) {
        PyErr_SetString(PyExc_ValueError, "not the files of neighbours");
        return -1;
    }
    for (int j = 0; j < host->count; j++) {
        int flags = PyBUF_C_CONTIGUOUS | (j == me ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(PyTuple_GetItem(files, j), &host->views[j], flags) < 0) {
            let_go(host);
            return -1;
        }
        host->held++;
        host->files[j] = host->views[j].buf;
        host->slot = (host->views[j].len - SLOTS) / 2 / 64 * 64;
        if (host->views[j].len != host->views[0].len || host->slot < 64 * MOST_NEIGHBOURS
            || (uintptr_t)host->files[j] % 64) {
            let_go(host);
            PyErr_SetString(PyExc_ValueError, "files of neighbours have one length, and begin at "
                                              "a line");
            return -1;
        }
    }
    return 0;
}

static inline uint32_t *word_of(const Host *host, int j, Py_ssize_t at)
{
    return (uint32_t *)(host->files[j] + at);
}

static inline uint32_t word(const Host *host, int j, Py_ssize_t at)
{
    return __atomic_load_n(word_of(host, j, at), __ATOMIC_ACQUIRE);
}

static void wake(const Host *host, int j, Py_ssize_t at)
{
    syscall(SYS_futex, word_of(host, j, at), FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void post(const Host *host, Py_ssize_t at, uint32_t value)
{
    __atomic_store_n(word_of(host, host->me, at), value, __ATOMIC_RELEASE);
    wake(host, host->me, at);
}

static inline int reached(uint32_t value, uint32_t wanted)
{
    return (int32_t)(value - wanted) >= 0;
}

static inline void pause_a_little(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The interpreter's lock is released from `enter` to `leave`; `still` is called with it. */
static void enter(Host *host)
{
    host->thread = PyEval_SaveThread();
}

static void leave(Host *host)
{
    if (host->thread != NULL)
        PyEval_RestoreThread(host->thread);
    host->thread = NULL;
}

/* Waits until a neighbour's word has reached `wanted`. Returns -1, with the lock taken and an
   exception set, if `still` raises meanwhile; else 0. */
static int await(Host *host, int j, Py_ssize_t at, uint32_t wanted)
{
    const struct timespec a_while = {0, SLEEP_NS};
    for (int look = 0; look < LOOKS; look++) {
        if (reached(word(host, j, at), wanted))
            return 0;
        pause_a_little();
    }
    for (int told = 0;;) {
        /* In this order: a neighbour whose session ends has given what it gave before. */
        uint32_t ends = word(host, j, OVER) | word(host, host->me, OVER);
        uint32_t now = word(host, j, at);
        long woken = 0;
        if (reached(now, wanted))
            return 0;
        /* What ends is asked about at once, and then as often as any other. */
        if (!ends || told)
            woken = syscall(SYS_futex, word_of(host, j, at), FUTEX_WAIT, now, &a_while, NULL, 0);
        if ((ends && !told) || (woken < 0 && errno == ETIMEDOUT)) {
            PyObject *answer;
            told = ends != 0;
            leave(host);
            answer = PyObject_CallFunction(host->still, "i", j);
            if (answer == NULL)
                return -1;
            Py_DECREF(answer);
            enter(host);
        }
    }
}

static int await_all(Host *host, Py_ssize_t at, uint32_t wanted)
{
    for (int j = 0; j < host->count; j++)
        if (j != host->me && await(host, j, at, wanted) < 0)
            return -1;
    return 0;
}

/* Slot of a part. */
static inline char *slot_of(const Host *host, int j, uint32_t part)
{
    return host->files[j] + SLOTS + (part & 1) * host->slot;
}

/* The first of `n` float32 that is not finite; -1: all are finite. */
static Py_ssize_t first_bad(const char *values, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, values + i * sizeof bits, sizeof bits);
        if ((bits & 0x7F800000u) == 0x7F800000u)
            return i;
    }
    return -1;
}

#ifdef HAS_AVX

/* Nothing is prefetched here: on one processor that made sums a quarter slower, since a line that a
   neighbour is about to write was fetched too early. The hardware sees the streams by itself. */

/* Not 0 if one of the elements x of `bad`, sums of x - x, is NaN. */
__attribute__((target("avx"))) static inline uint32_t not_zero(__m256 bad)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(bad, bad, _CMP_UNORD_Q));
}

/* `copy_checked` of whole lines. Returns 0 if all are finite. */
__attribute__((target("avx"))) static uint32_t copy_lines(char *out, const char *in, Py_ssize_t n)
{
    __m256 bad = _mm256_setzero_ps(), other = bad;
    for (Py_ssize_t at = 0; at < n * (Py_ssize_t)sizeof(float); at += LINE * sizeof(float)) {
        __m256 low = _mm256_loadu_ps((const void *)(in + at));
        __m256 high = _mm256_loadu_ps((const void *)(in + at + 32));
        bad = _mm256_add_ps(bad, _mm256_sub_ps(low, low));
        other = _mm256_add_ps(other, _mm256_sub_ps(high, high));
        if (out != NULL) {
            _mm256_storeu_ps((void *)(out + at), low);
            _mm256_storeu_ps((void *)(out + at + 32), high);
        }
    }
    return not_zero(_mm256_add_ps(bad, other));
}

/* `sum` of whole lines. Returns 0 if all are finite. */
__attribute__((target("avx"))) static uint32_t sum_lines(
    char *out, char *more, char *const *in, int count, Py_ssize_t n, float divisor,
    int past_caches)
{
    __m256 bad = _mm256_setzero_ps(), other = bad, by = _mm256_set1_ps(divisor);
    for (Py_ssize_t at = 0; at < n * (Py_ssize_t)sizeof(float); at += LINE * sizeof(float)) {
        __m256 low = _mm256_loadu_ps((void *)(in[0] + at));
        __m256 high = _mm256_loadu_ps((void *)(in[0] + at + 32));
        for (int r = 1; r < count; r++) {
            low = _mm256_add_ps(low, _mm256_loadu_ps((void *)(in[r] + at)));
            high = _mm256_add_ps(high, _mm256_loadu_ps((void *)(in[r] + at + 32)));
        }
        if (divisor != 1.0f) {
            low = _mm256_div_ps(low, by);
            high = _mm256_div_ps(high, by);
        }
        bad = _mm256_add_ps(bad, _mm256_sub_ps(low, low));
        other = _mm256_add_ps(other, _mm256_sub_ps(high, high));
        if (past_caches) {
            _mm256_stream_ps((void *)(out + at), low);
            _mm256_stream_ps((void *)(out + at + 32), high);
        } else {
            _mm256_storeu_ps((void *)(out + at), low);
            _mm256_storeu_ps((void *)(out + at + 32), high);
        }
        if (more != NULL) {
            _mm256_storeu_ps((void *)(more + at), low);
            _mm256_storeu_ps((void *)(more + at + 32), high);
        }
    }
    _mm_sfence();
    return not_zero(_mm256_add_ps(bad, other));
}

#endif

/* Copies `n` float32, to nowhere if `out` is NULL. Returns whether all are finite. */
static int copy_checked(char *out, const char *in, Py_ssize_t n)
{
    Py_ssize_t i = 0;
    uint32_t bad = 0;
#ifdef HAS_AVX
    if (HAS_AVX)
        bad = copy_lines(out, in, (i = n - n % LINE));
#endif
    for (; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, in + i * sizeof bits, sizeof bits);
        bad |= (bits & 0x7F800000u) == 0x7F800000u;
        if (out != NULL)
            memcpy(out + i * sizeof bits, &bits, sizeof bits);
    }
    return !bad;
}

/* Writes ((in[0] + in[1]) + in[2]) ..., divided by `divisor`, to `out`, and to `more` unless that
   is NULL. Returns whether all is finite. `out` may be one of `in`. */
static int sum(char *out, char *more, char *const *in, int count, Py_ssize_t n, float divisor,
               int past_caches)
{
    Py_ssize_t i = 0;
    uint32_t bad = 0;
#ifdef HAS_AVX
    if (HAS_AVX)
        bad = sum_lines(out, more, in, count, (i = n - n % LINE), divisor,
                        past_caches && (uintptr_t)out % (LINE * sizeof(float)) == 0);
#endif
    for (; i < n; i++) {
        float acc, term;
        memcpy(&acc, in[0] + i * sizeof acc, sizeof acc);
        for (int r = 1; r < count; r++) {
            memcpy(&term, in[r] + i * sizeof term, sizeof term);
            acc = acc + term;
        }
        if (divisor != 1.0f)
            acc = acc / divisor;
        bad |= !(acc - acc == 0.0f);
        memcpy(out + i * sizeof acc, &acc, sizeof acc);
        if (more != NULL)
            memcpy(more + i * sizeof acc, &acc, sizeof acc);
    }
    return !bad;
}

/* One sum of float32 among all neighbours. */
typedef struct {
    Host *host;
    char *out;
    char *in;
    Py_ssize_t size;        /* Elements. */
    Py_ssize_t call_at;     /* Where this rank's Call is, and its neighbours' are. */
    Py_ssize_t call_bytes;
    uint32_t part;          /* The next part. */
    float divisor;
    int past_caches;
    int place;              /* Of a neighbour that made another call; -1: none did. */
    PyObject *found;        /* Called with what is not finite; None: nobody asks. */
} Sum;

/* How it goes. */
enum { FAILED = -1, DONE, OTHER_CALL };

/* Says that an element is not finite. Unless that raises, the call goes on without such checks. */
static int tell(Sum *s, int in_sum, Py_ssize_t element)
{
    PyObject *answer;
    leave(s->host);
    answer = PyObject_CallFunction(s->found, "in", in_sum, element);
    if (answer == NULL)
        return FAILED;
    Py_DECREF(answer);
    s->found = Py_None;
    enter(s->host);
    return DONE;
}

/* Compares the Calls, which each rank wrote before its first part. */
static int compare(Sum *s)
{
    const Host *host = s->host;
    for (int j = 0; j < host->count; j++)
        if (memcmp(host->files[j] + s->call_at, host->files[host->me] + s->call_at,
                   (size_t)s->call_bytes) != 0) {
            s->place = j;
            return OTHER_CALL;
        }
    return DONE;
}

/* Elements `at` to `at` + `n` of the input, into the slot; nowhere if `to` is NULL. */
static int put(Sum *s, char *to, Py_ssize_t at, Py_ssize_t n)
{
    const char *from = s->in + at * sizeof(float);
    if (s->found != Py_None)
        return copy_checked(to, from, n) ? DONE : tell(s, 0, at + first_bad(from, n));
    if (to != NULL)
        memcpy(to, from, (size_t)n * sizeof(float));
    return DONE;
}

static int sum_some(Sum *s, char *more, char *const *in, Py_ssize_t at, Py_ssize_t n)
{
    char *out = s->out + at * sizeof(float);
    int finite = sum(out, more, in, s->host->count, n, s->divisor, s->past_caches);
    return finite || s->found == Py_None ? DONE : tell(s, 1, at + first_bad(out, n));
}

static inline Py_ssize_t least(Py_ssize_t one, Py_ssize_t other)
{
    return one < other ? one : other;
}

/* Each rank gives all of its input, and reduces all of it: one wait for each part. */
static int sum_whole(Sum *s)
{
    Host *host = s->host;
    char *in[MOST_NEIGHBOURS];
    Py_ssize_t most = host->slot / (Py_ssize_t)sizeof(float), put_to = 0;
    for (Py_ssize_t at = 0; at == 0 || at < s->size; at += most, s->part++) {
        int how;
        /* The next part is given before this one is awaited: neighbours rarely wait then. */
        for (uint32_t ahead = put_to > at; ahead < 2 && (put_to < s->size || put_to == 0); ahead++) {
            Py_ssize_t n = least(most, s->size - put_to);
            if (await_all(host, TAKEN, s->part + ahead - 1) < 0)
                return FAILED;
            if ((how = put(s, slot_of(host, host->me, s->part + ahead), put_to, n)) != DONE)
                return how;
            post(host, GIVEN, s->part + ahead + 1);
            put_to += most;
        }
        if (await_all(host, GIVEN, s->part + 1) < 0)
            return FAILED;
        if (at == 0 && (how = compare(s)) != DONE)
            return how;
        for (int j = 0; j < host->count; j++)
            in[j] = j == host->me ? s->in + at * sizeof(float) : slot_of(host, j, s->part);
        if ((how = sum_some(s, NULL, in, at, least(most, s->size - at))) != DONE)
            return how;
        post(host, TAKEN, s->part + 1);
    }
    return DONE;
}

/* Where what rank `from` gives to rank `to` begins in a slot, in pieces of `most` elements. */
static inline Py_ssize_t piece_at(int from, int to, Py_ssize_t most)
{
    return (to < from ? to : to - 1) * most * (Py_ssize_t)sizeof(float);
}

/* A window of the elements, cut among the ranks. */
typedef struct {
    Py_ssize_t at, size, segment;
} Window;

static Window window(const Sum *s, Py_ssize_t most, Py_ssize_t number)
{
    Py_ssize_t count = s->host->count, at = number * count * most;
    Py_ssize_t size = least(count * most, s->size - at), segment = (size + count - 1) / count;
    return (Window){at, size, (segment + 15) / 16 * 16};
}

static Py_ssize_t start_of(const Window *w, int j)
{
    return least(w->size, j * w->segment);
}

/* Gives each neighbour its segment of a window. */
static int scatter(Sum *s, Py_ssize_t most, const Window *w, uint32_t part)
{
    Host *host = s->host;
    if (await_all(host, TAKEN, part - 1) < 0)
        return FAILED;
    for (int j = 0; j < host->count; j++) {
        Py_ssize_t from = start_of(w, j), n = start_of(w, j + 1) - from;
        char *slot = slot_of(host, host->me, part);
        int how = put(s, j == host->me ? NULL : slot + piece_at(host->me, j, most), w->at + from, n);
        if (how != DONE)
            return how;
    }
    post(host, GIVEN, part + 1);
    return DONE;
}

/* Each rank reduces a segment of each window: two parts, of which each neighbour reads little. */
static int sum_cut(Sum *s)
{
    Host *host = s->host;
    int me = host->me, how;
    char *in[MOST_NEIGHBOURS];
    Py_ssize_t most = host->slot / (host->count - 1) / 64 * 16;
    Py_ssize_t windows = (s->size + host->count * most - 1) / (host->count * most);
    for (Py_ssize_t i = 0; i < windows; i++, s->part += 2) {
        Window w = window(s, most, i), next = window(s, most, i + 1);
        Py_ssize_t from = start_of(&w, me), n = start_of(&w, me + 1) - from;
        if (i == 0 && (how = scatter(s, most, &w, s->part)) != DONE)
            return how;
        if (await_all(host, GIVEN, s->part + 1) < 0)
            return FAILED;
        if (i == 0 && (how = compare(s)) != DONE)
            return how;
        for (int j = 0; j < host->count; j++)
            in[j] = j == me ? s->in + (w.at + from) * sizeof(float)
                            : slot_of(host, j, s->part) + piece_at(j, me, most);
        /* The other slot: it was read whole when all had taken the part before. */
        if (await_all(host, TAKEN, s->part) < 0)
            return FAILED;
        if ((how = sum_some(s, slot_of(host, me, s->part + 1), in, w.at + from, n)) != DONE)
            return how;
        post(host, TAKEN, s->part + 1);
        post(host, GIVEN, s->part + 2);
        if (i + 1 < windows && (how = scatter(s, most, &next, s->part + 2)) != DONE)
            return how;
        for (int step = 1; step < host->count; step++) {
            int j = (me + step) % host->count;
            Py_ssize_t start = start_of(&w, j), some = start_of(&w, j + 1) - start;
            if (await(host, j, GIVEN, s->part + 2) < 0)
                return FAILED;
            memcpy(s->out + (w.at + start) * sizeof(float), slot_of(host, j, s->part + 1),
                   (size_t)some * sizeof(float));
        }
        post(host, TAKEN, s->part + 2);
    }
    return DONE;
}

PyDoc_STRVAR(all_reduce_doc,
"all_reduce(files, me, still, part, call_at, call_bytes, out, values, divisor, found, /)\n--\n\n"
"Adds the float32 `values` of all neighbours, in order, divides by `divisor`, and writes `out`.\n\n"
"`out` is `values`, or apart from it. Calls `still(place)` at least every tenth of a second while\n"
"it waits for a neighbour, and `found(in_sum, element)` for the first value that is not finite,\n"
"unless that is None. The GIL is released meanwhile. Returns the place of a neighbour that made\n"
"another call, or -1, and the number of the next part.\n\n"
"Raises:\n    ValueError: the lengths do not match.\n    Exception: what a callback raised.\n");

static PyObject *all_reduce(PyObject *module, PyObject *args)
{
    PyObject *files, *still, *out_object, *in_object, *answer = NULL;
    Py_buffer out, in;
    Host host;
    Sum s = {.host = &host, .place = -1};
    int me, how, small;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!iOInnOOfO", &PyTuple_Type, &files, &me, &still, &s.part,
                          &s.call_at, &s.call_bytes, &out_object, &in_object, &s.divisor, &s.found)
        || take_files(&host, files, me, still) < 0)
        return NULL;
    if (PyObject_GetBuffer(out_object, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        goto no_out;
    if (PyObject_GetBuffer(in_object, &in, PyBUF_C_CONTIGUOUS) < 0)
        goto no_in;
    if (in.len != out.len || in.len % (Py_ssize_t)sizeof(float) || host.count < 2
        || s.call_at < 0 || s.call_bytes < 0 || s.call_at > SLOTS - s.call_bytes) {
        PyErr_SetString(PyExc_ValueError, "values and out must be of one length, in whole items");
        goto fail;
    }
    s.in = in.buf;
    s.out = out.buf;
    s.size = in.len / (Py_ssize_t)sizeof(float);
    small = in.len <= SMALL && in.len <= host.slot;
    /* A result that is not the input is in no cache yet, and need not be read to be written. */
    s.past_caches = s.in != s.out && in.len > host.slot;
    enter(&host);
    how = host.count == 2 || small ? sum_whole(&s) : sum_cut(&s);
    leave(&host);
    if (how != FAILED)
        answer = Py_BuildValue("iI", s.place, s.part);
fail:
    PyBuffer_Release(&in);
no_in:
    PyBuffer_Release(&out);
no_out:
    let_go(&host);
    return answer;
}

PyDoc_STRVAR(wait_word_doc,
"wait_word(files, me, still, at, value, /)\n--\n\n"
"Waits until the word at `at` of all other files has reached `value`. `still` as in all_reduce.\n");

static PyObject *wait_word(PyObject *module, PyObject *args)
{
    PyObject *files, *still;
    Py_ssize_t at;
    unsigned int value;
    Host host;
    int me, how;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!iOnI", &PyTuple_Type, &files, &me, &still, &at, &value)
        || take_files(&host, files, me, still) < 0)
        return NULL;
    if (at < 0 || at % 64 || at >= SLOTS) {
        let_go(&host);
        PyErr_SetString(PyExc_ValueError, "there is no such word");
        return NULL;
    }
    enter(&host);
    how = await_all(&host, at, value);
    leave(&host);
    let_go(&host);
    return how < 0 ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(set_word_doc,
"set_word(file, at, value, /)\n--\n\n"
"Writes a word behind all that was written before, and wakes those who wait for it.\n"
"None in place of a value only wakes them.\n");

static PyObject *set_word(PyObject *module, PyObject *args)
{
    PyObject *file, *value;
    Py_ssize_t at;
    Host host = {.count = 1};
    unsigned long number = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OnO", &file, &at, &value))
        return NULL;
    if (value != Py_None)
        number = PyLong_AsUnsignedLong(value);
    if (PyErr_Occurred() || PyObject_GetBuffer(file, &host.views[0], value == Py_None
                                               ? PyBUF_C_CONTIGUOUS
                                               : PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return NULL;
    host.held = 1;
    host.files[0] = host.views[0].buf;
    if (at < 0 || at % 64 || at >= host.views[0].len - 64 || (uintptr_t)host.files[0] % 64) {
        let_go(&host);
        PyErr_SetString(PyExc_ValueError, "there is no such word");
        return NULL;
    }
    if (value != Py_None)
        __atomic_store_n(word_of(&host, 0, at), (uint32_t)number, __ATOMIC_RELEASE);
    wake(&host, 0, at);
    let_go(&host);
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(copy_doc,
"copy(out, values, /)\n--\n\n"
"Copies bytes. The GIL is released meanwhile.\n\nRaises:\n    ValueError: the lengths do not match.\n");

static PyObject *copy(PyObject *module, PyObject *args)
{
    PyObject *out_object, *in_object;
    Py_buffer out, in;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &out_object, &in_object)
        || PyObject_GetBuffer(in_object, &in, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    if (take(&out, out_object, PyBUF_WRITABLE, in.len, "out") < 0) {
        PyBuffer_Release(&in);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    if (out.buf != in.buf)
        memmove(out.buf, in.buf, (size_t)in.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&out);
    PyBuffer_Release(&in);
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(checked_copy_doc,
"checked_copy(out, values, /)\n--\n\n"
"Copies float32; None in place of `out`: to nowhere. Returns the first one that is not finite, or\n"
"-1. The GIL is released meanwhile.\n\nRaises:\n    ValueError: the lengths do not match.\n");

static PyObject *checked_copy(PyObject *module, PyObject *args)
{
    PyObject *out_object, *in_object, *answer = NULL;
    Py_buffer out = {0}, in;
    Py_ssize_t bad = -1, n;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &out_object, &in_object)
        || PyObject_GetBuffer(in_object, &in, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    n = in.len / (Py_ssize_t)sizeof(float);
    if (in.len % (Py_ssize_t)sizeof(float))
        PyErr_SetString(PyExc_ValueError, "values must be whole float32");
    else if (out_object == Py_None || take(&out, out_object, PyBUF_WRITABLE, in.len, "out") == 0) {
        Py_BEGIN_ALLOW_THREADS
        if (!copy_checked(out.buf, in.buf, n))
            bad = first_bad(out.buf != NULL ? out.buf : in.buf, n);
        Py_END_ALLOW_THREADS
        if (out_object != Py_None)
            PyBuffer_Release(&out);
        answer = PyLong_FromSsize_t(bad);
    }
    PyBuffer_Release(&in);
    return answer;
}

PyDoc_STRVAR(sum_doc,
"sum(out, vectors, divisor, /)\n--\n\n"
"Adds float32 vectors in order, and divides by `divisor`. Returns the first element of the result\n"
"that is not finite, or -1. `out` may be one of the vectors. The GIL is released meanwhile.\n\n"
"Raises:\n    ValueError: the lengths do not match.\n");

static PyObject *sum_vectors(PyObject *module, PyObject *args)
{
    PyObject *out, *vectors;
    Arguments given;
    Py_ssize_t bad = -1;
    float divisor;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!f", &out, &PyTuple_Type, &vectors, &divisor)
        || hold(&given, out, vectors, NULL, -1, sizeof(float)) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (!sum(given.out.buf, NULL, given.vectors, (int)given.count,
             given.out.len / (Py_ssize_t)sizeof(float), divisor, 0))
        bad = first_bad(given.out.buf, given.out.len / (Py_ssize_t)sizeof(float));
    Py_END_ALLOW_THREADS
    release(&given);
    return PyLong_FromSsize_t(bad);
}

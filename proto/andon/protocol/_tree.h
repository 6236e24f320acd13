/* The mean of nodes of the tree over a batch's grains, in one pass: docs/protocol-same-bits.md.

   Gives the same bits as andon_reducer.core.tree. Included by _fused.c alone, which has the checks:
   nothing here checks a length.

   The nodes come in the order of their grains, each with the number of sums that can be done once
   it is there: a sum joins the two parts that came last, so the parts that wait are a stack. All
   nodes of a strip are joined before the next strip. What waits lies in the first-level cache, or
   is a vector as it came. The last sum is divided, checked and written in one go. */

/* Floats of a strip. */
#define TREE_STRIP 512

/* Parts that wait, at most: no tree over fewer than 2^63 grains is deeper. */
#define TREE_DEPTH 64

typedef struct {
    char *out, *const *vectors;
    const unsigned char *sums;  /* How many after each vector; one less than vectors in all. */
    Py_ssize_t count;
    float divisor;              /* 0 keeps zeros of the root, and what is not finite. */
    int past_caches;
} TreeMean;

/* Writes left + right; just left if right is NULL. */
typedef struct {
    char *out;
    const char *left, *right;
} TreeSum;

static inline float float_at(const char *vector, Py_ssize_t at)
{
    float number;
    memcpy(&number, vector + at * sizeof number, sizeof number);
    return number;
}

/* Elements `at` to `n` of a sum within the tree. */
static void join_rest(TreeSum sum, Py_ssize_t at, Py_ssize_t n)
{
    for (; at < n; at++) {
        float number = float_at(sum.left, at) + float_at(sum.right, at);
        memcpy(sum.out + at * sizeof number, &number, sizeof number);
    }
}

/* Elements `at` to `n` of the mean. Returns whether they are finite. */
static int divide_rest(TreeSum sum, Py_ssize_t at, Py_ssize_t n, float divisor)
{
    int finite = 1;
    for (; at < n; at++) {
        float number = float_at(sum.left, at);
        if (sum.right != NULL)
            number = number + float_at(sum.right, at);
        number = divisor != 0.0f ? number / divisor : number * 0.0f + 0.0f;
        finite &= number - number == 0.0f;
        memcpy(sum.out + at * sizeof number, &number, sizeof number);
    }
    return finite;
}

#ifdef HAS_AVX

#define TREE_AVX __attribute__((target("avx"))) static

/* Half a line of a sum. */
TREE_AVX inline __m256 half_line(TreeSum sum, Py_ssize_t at)
{
    __m256 number = _mm256_loadu_ps((void *)(sum.left + at));
    if (sum.right != NULL)
        number = _mm256_add_ps(number, _mm256_loadu_ps((void *)(sum.right + at)));
    return number;
}

/* These do whole lines, `n` floats. */

TREE_AVX void join_lines(TreeSum sum, Py_ssize_t n)
{
    for (Py_ssize_t at = 0; at < n * (Py_ssize_t)sizeof(float); at += LINE * sizeof(float)) {
        _mm_prefetch(sum.left + at + TREE_STRIP * sizeof(float), _MM_HINT_T0);
        _mm_prefetch(sum.right + at + TREE_STRIP * sizeof(float), _MM_HINT_T0);
        _mm256_storeu_ps((void *)(sum.out + at), half_line(sum, at));
        _mm256_storeu_ps((void *)(sum.out + at + 32), half_line(sum, at + 32));
    }
}

TREE_AVX int divide_lines(TreeSum sum, Py_ssize_t n, float divisor, int past_caches)
{
    const __m256 zero = _mm256_setzero_ps(), by = _mm256_set1_ps(divisor);
    __m256 bad = zero;
    for (Py_ssize_t at = 0; at < n * (Py_ssize_t)sizeof(float); at += 32) {
        __m256 number = half_line(sum, at);
        if (divisor != 0.0f)
            number = _mm256_div_ps(number, by);
        else
            number = _mm256_add_ps(_mm256_mul_ps(number, zero), zero);
        bad = _mm256_add_ps(bad, _mm256_sub_ps(number, number));
        if (past_caches)
            _mm256_stream_ps((void *)(sum.out + at), number);
        else
            _mm256_storeu_ps((void *)(sum.out + at), number);
    }
    return _mm256_movemask_ps(_mm256_cmp_ps(bad, bad, _CMP_UNORD_Q)) == 0;
}

#endif

static void join(TreeSum sum, Py_ssize_t n)
{
    Py_ssize_t done = 0;
#ifdef HAS_AVX
    if (HAS_AVX)
        join_lines(sum, done = n - n % LINE);
#endif
    join_rest(sum, done, n);
}

static int divide(TreeSum sum, Py_ssize_t n, float divisor, int past_caches)
{
    Py_ssize_t done = 0;
    int finite = 1;
#ifdef HAS_AVX
    if (HAS_AVX)
        finite = divide_lines(sum, done = n - n % LINE, divisor, past_caches);
#endif
    return divide_rest(sum, done, n, divisor) & finite;
}

/* The strip of the mean that starts at byte `at`. Returns whether it is finite. */
static int tree_mean_of_strip(const TreeMean *mean, Py_ssize_t at, Py_ssize_t n)
{
    char rooms[TREE_DEPTH][TREE_STRIP * sizeof(float)];
    const char *parts[TREE_DEPTH + 1];
    int waiting = 0;
    for (Py_ssize_t r = 0; r < mean->count; r++) {
        parts[waiting++] = mean->vectors[r] + at;
        for (int left = mean->sums[r]; left > 0; left--) {
            TreeSum sum = {rooms[waiting - 2], parts[waiting - 2], parts[waiting - 1]};
            waiting--;
            if (r + 1 == mean->count && waiting == 1) {
                sum.out = mean->out + at;
                return divide(sum, n, mean->divisor, mean->past_caches);
            }
            join(sum, n);
            parts[waiting - 1] = sum.out;
        }
    }
    return divide((TreeSum){mean->out + at, parts[0], NULL}, n, mean->divisor, mean->past_caches);
}

/* The mean of vectors of `size` elements. Returns whether it is finite. */
static int tree_mean_of(const TreeMean *mean, Py_ssize_t size)
{
    int finite = 1;
    for (Py_ssize_t start = 0; start < size; start += TREE_STRIP) {
        Py_ssize_t n = size - start < TREE_STRIP ? size - start : TREE_STRIP;
        finite &= tree_mean_of_strip(mean, start * (Py_ssize_t)sizeof(float), n);
    }
#ifdef HAS_AVX
    /* As in mean_of_lines. */
    _mm_sfence();
#endif
    return finite;
}

/* The trimmed mean of a few thousand elements: docs/protocol-data.md.

   Gives the same bits as andon_reducer.core.trimmed, which says how. Included by _fused.c alone,
   which has the checks: nothing here checks a length.

   A strip of elements is compared, pair by pair of its contributions, while all of it lies in the
   first-level cache. A comparison is 1 or 0, so nothing branches, and a compiler makes vectors of
   the loops. */

/* Elements of a strip. */
#define TRIM_STRIP 32

/* Compiled once for any processor, and once for one with AVX2. */
#ifdef __GNUC__
#define TRIM_INLINE static inline __attribute__((always_inline))
#else
#define TRIM_INLINE static inline
#endif

typedef struct {
    float *out;
    const float *values;        /* Rows of `stride` elements, one for each contribution. */
    Py_ssize_t stride, count, cut, size;
    const double *shares;
    int32_t *places;            /* TRIM_STRIP for each contribution. */
} TrimmedMean;

/* Elements `at` to `at` + `n`, at most a strip. Adds x - x of each contribution x to `bad`: that is
   0 if x is finite, else NaN, and a NaN stays. Inlined, so that the compiler knows `n`. */
TRIM_INLINE void trim_some(const TrimmedMean *mean, Py_ssize_t at, int n, float *bad)
{
    double acc[TRIM_STRIP], weight[TRIM_STRIP];
    float chosen[TRIM_STRIP];
    int32_t least = (int32_t)mean->cut, beyond = (int32_t)(mean->count - mean->cut);
    for (Py_ssize_t r = 0; r < mean->count; r++) {
        const float *row = mean->values + r * mean->stride + at;
        int32_t *place = mean->places + r * TRIM_STRIP;
        for (int j = 0; j < n; j++)
            place[j] = 0;
        for (int j = 0; j < n; j++)
            bad[j] += row[j] - row[j];
    }
    for (Py_ssize_t r = 0; r < mean->count; r++) {
        const float *lower = mean->values + r * mean->stride + at;
        int32_t *own = mean->places + r * TRIM_STRIP;
        for (Py_ssize_t s = r + 1; s < mean->count; s++) {
            const float *higher = mean->values + s * mean->stride + at;
            int32_t *other = mean->places + s * TRIM_STRIP;
            for (int j = 0; j < n; j++) {
                int32_t before = lower[j] <= higher[j];
                other[j] += before;
                own[j] += 1 - before;
            }
        }
    }
    for (int j = 0; j < n; j++) {
        acc[j] = -0.0;
        weight[j] = 0.0;
    }
    for (Py_ssize_t r = 0; r < mean->count; r++) {
        const float *row = mean->values + r * mean->stride + at;
        const int32_t *place = mean->places + r * TRIM_STRIP;
        double share = mean->shares[r];
        for (int j = 0; j < n; j++) {
            int32_t is_kept = (place[j] >= least) & (place[j] < beyond);
            uint32_t bits;
            memcpy(&bits, &row[j], sizeof bits);
            /* -0.0 of what is not kept: it changes no sum. */
            bits = (bits & -(uint32_t)is_kept) | ((uint32_t)(1 - is_kept) << 31);
            memcpy(&chosen[j], &bits, sizeof bits);
            weight[j] += share * is_kept;
        }
        for (int j = 0; j < n; j++)
            acc[j] += share * (double)chosen[j];
    }
    for (int j = 0; j < n; j++)
        mean->out[at + j] = (float)(acc[j] / weight[j]);
}

/* All elements. Returns whether all contributions to them are finite. */
TRIM_INLINE int trim_all(const TrimmedMean *mean)
{
    float bad[TRIM_STRIP] = {0};
    Py_ssize_t at = 0;
    int finite = 1;
    for (; at + TRIM_STRIP <= mean->size; at += TRIM_STRIP)
        trim_some(mean, at, TRIM_STRIP, bad);
    for (; at < mean->size; at++)
        trim_some(mean, at, 1, bad);
    for (int j = 0; j < TRIM_STRIP; j++)
        finite &= bad[j] == 0;
    return finite;
}

static int trim_anywhere(const TrimmedMean *mean)
{
    return trim_all(mean);
}

#ifdef HAS_AVX2

__attribute__((target("avx2"))) static int trim_avx2(const TrimmedMean *mean)
{
    return trim_all(mean);
}

#endif

/* Encodings with a scale for each strip of elements: 8, 4 and 2 bits, to and fro, and their means.

   Gives the same bits as andon.protocol.strips, which says what the codes mean. Included by
   _fused.c alone, which has the checks: nothing here checks a length.

   These are plain loops over one strip, for any processor. Inlined with a length that the compiler
   knows, they become what instructions there are. _strips_avx2.h does whole strips by hand, since
   compilers narrow floats to bytes badly. No result depends on which of them did it. */

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

/* Elements of the longest strip. */
#define STRIP_MOST 128

#define STRIP_OF(bits) ((bits) == 8 ? 128 : (bits) == 4 ? 32 : 64)
#define GREATEST_CODE(bits) ((1 << ((bits) - 1)) - 1)

/* As bits. */
#define LEAST_SCALE 0x00800000u     /* 2^-126: anything below is subnormal. */
#define NOT_A_SCALE 0x7F800000u     /* Infinite, NaN or negative, from here on. */
#define GREATEST_SCALED 0x7B800000u /* 2^120 */
#define MINUS_ZERO 0x80000000u
#define QUIET_NAN 0x7FC00000u

/* 1.5 * 2^23: a float32 near it is an integer. So adding it rounds to nearest, ties to even. */
#define ROUNDER 12582912.0f
#define ROUNDER_BITS 0x4B400000u

static Py_ssize_t strips_of(Py_ssize_t n, int bits)
{
    return n / STRIP_OF(bits) + (n % STRIP_OF(bits) != 0);
}

/* The length of the payload of `n` elements, which are few enough. */
static Py_ssize_t payload_bytes(Py_ssize_t n, int bits)
{
    return 4 * strips_of(n, bits) + (n * bits + 7) / 8;
}

INLINE uint32_t bits_of(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* The greatest magnitude of `n` numbers, as bits: those of a NaN are above all others. */
INLINE uint32_t greatest_of(const float *numbers, int n)
{
    int32_t most = 0;
    for (int j = 0; j < n; j++) {
        int32_t magnitude = (int32_t)(bits_of(numbers[j]) & ~MINUS_ZERO);
        most = magnitude > most ? magnitude : most;
    }
    return (uint32_t)most;
}

/* The scale of a strip whose greatest magnitude has the bits `most`. A greatest code of 1 is that of
   2 bits. */
INLINE float scale_for(uint32_t most, int greatest)
{
    uint32_t bits = bits_of(greatest == 1 ? float_of(most) * 0.75f
                                          : float_of(most) / (float)greatest);
    /* 16 significant bits, so that a product with a code is exact. */
    return float_of(bits < LEAST_SCALE ? 0 : (bits + 0x7Fu + ((bits >> 8) & 1u)) & 0xFFFFFF00u);
}

/* What a number is multiplied by to get its code. */
INLINE float factor_for(float scale)
{
    return scale > 0 ? 1.0f / scale : 0.0f;
}

/* The codes of `n` numbers. They are of no use if a number is beyond GREATEST_SCALED. */
INLINE void encode_strip(int8_t *codes, const float *numbers, int n, int greatest, float scale)
{
    float factor = factor_for(scale);
    for (int j = 0; j < n; j++) {
        uint32_t code = bits_of(numbers[j] * factor + ROUNDER) - ROUNDER_BITS;
        code = bits_of(numbers[j]) == MINUS_ZERO ? (uint32_t)(-greatest - 1) : code;
        codes[j] = (int8_t)(code & 0xFFu);
    }
}

INLINE void decode_strip(float *numbers, const int8_t *codes, int n, int greatest, float scale)
{
    if (bits_of(scale) >= NOT_A_SCALE) {
        for (int j = 0; j < n; j++)
            numbers[j] = float_of(codes[j] == 1 ? 0 : QUIET_NAN);
        return;
    }
    for (int j = 0; j < n; j++) {
        uint32_t bits = bits_of((float)codes[j] * scale);
        numbers[j] = float_of(codes[j] == -greatest - 1 ? MINUS_ZERO : bits);
    }
}

/* Puts the codes of a strip into the bytes of a payload, and takes them out. Two codes of 4 bits, or
   four of 2, are in one byte, the first of them in its lowest bits. */

INLINE void put_codes(char *to, const int8_t *codes, int n, int bits)
{
    if (bits == 8) {
        memcpy(to, codes, (size_t)n);
        return;
    }
    for (int j = 0, each = 8 / bits; j < n; j += each) {
        int byte = 0;
        for (int k = 0; k < each && j + k < n; k++)
            byte |= (codes[j + k] & ((1 << bits) - 1)) << k * bits;
        to[j / each] = (char)byte;
    }
}

INLINE void take_codes(int8_t *codes, const char *from, int n, int bits)
{
    if (bits == 8) {
        memcpy(codes, from, (size_t)n);
        return;
    }
    const int each = 8 / bits, sign = 1 << (bits - 1);
    for (int j = 0; j < n; j++) {
        int code = (unsigned char)from[j / each] >> j % each * bits & (2 * sign - 1);
        codes[j] = (int8_t)((code ^ sign) - sign);
    }
}

/* A payload, as its two parts. */
typedef struct {
    char *scales, *codes;
} Strips;

INLINE Strips strips_at(char *payload, Py_ssize_t n, int bits)
{
    return (Strips){payload, payload + 4 * strips_of(n, bits)};
}

INLINE float scale_of(Strips strips, Py_ssize_t start, int bits)
{
    float scale;
    memcpy(&scale, strips.scales + start / STRIP_OF(bits) * 4, sizeof scale);
    return scale;
}

INLINE void put_strip(Strips strips, Py_ssize_t start, const float *numbers, int8_t *codes, int n,
                      int bits, uint32_t most)
{
    float scale = scale_for(most, GREATEST_CODE(bits));
    encode_strip(codes, numbers, n, GREATEST_CODE(bits), scale);
    memcpy(strips.scales + start / STRIP_OF(bits) * 4, &scale, sizeof scale);
    put_codes(strips.codes + start * bits / 8, codes, n, bits);
}

INLINE void take_strip(float *numbers, Strips strips, Py_ssize_t start, int n, int bits)
{
    int8_t codes[STRIP_MOST];
    take_codes(codes, strips.codes + start * bits / 8, n, bits);
    decode_strip(numbers, codes, n, GREATEST_CODE(bits), scale_of(strips, start, bits));
}

/* Encodes the strip from `start` on, and writes to `residual`, if it is not NULL, what is lost.
   Returns the greatest magnitude as bits. */
INLINE uint32_t narrow_strip(Strips out, const char *values, char *residual, Py_ssize_t start, int n,
                             int bits)
{
    float numbers[STRIP_MOST], lost[STRIP_MOST];
    int8_t codes[STRIP_MOST];
    uint32_t most;
    memcpy(numbers, values + start * 4, (size_t)n * 4);
    most = greatest_of(numbers, n);
    put_strip(out, start, numbers, codes, n, bits, most);
    if (residual != NULL) {
        decode_strip(lost, codes, n, GREATEST_CODE(bits), scale_of(out, start, bits));
        for (int j = 0; j < n; j++)
            lost[j] = numbers[j] - lost[j];
        memcpy(residual + start * 4, lost, (size_t)n * 4);
    }
    return most;
}

/* Encodes `n` values, those from `start` on. Returns whether all of them can be encoded. */
INLINE int narrow_strips(char *out, const char *values, char *residual, Py_ssize_t n,
                         Py_ssize_t start, int bits)
{
    const int strip = STRIP_OF(bits);
    Strips strips = strips_at(out, n, bits);
    int fits = 1;
    for (; start + strip <= n; start += strip)
        fits &= narrow_strip(strips, values, residual, start, strip, bits) <= GREATEST_SCALED;
    if (start < n)
        fits &= narrow_strip(strips, values, residual, start, (int)(n - start), bits)
                <= GREATEST_SCALED;
    return fits;
}

/* Decodes `some` elements of a payload of `n`, from `start` on, which begins a strip; those from the
   `at`-th on. */
INLINE void widen_strips(char *out, char *payload, Py_ssize_t n, Py_ssize_t start, Py_ssize_t some,
                         Py_ssize_t at, int bits)
{
    const int strip = STRIP_OF(bits);
    Strips strips = strips_at(payload, n, bits);
    float numbers[STRIP_MOST];
    for (; at + strip <= some; at += strip) {
        take_strip(numbers, strips, start + at, strip, bits);
        memcpy(out + at * 4, numbers, (size_t)strip * 4);
    }
    if (at < some) {
        take_strip(numbers, strips, start + at, (int)(some - at), bits);
        memcpy(out + at * 4, numbers, (size_t)(some - at) * 4);
    }
}

/* What the strips of a mean are made of. */
typedef struct {
    char *out, *const *vectors;
    const float *shares;
    Py_ssize_t count, size;
    int wide;
} StripMean;

/* The mean of the strip from `start` on. Returns whether it is finite, and can be encoded. */
INLINE int mean_of_strip(const StripMean *mean, Py_ssize_t start, int n, int bits)
{
    float acc[STRIP_MOST], term[STRIP_MOST];
    int8_t codes[STRIP_MOST];
    uint32_t most;
    for (Py_ssize_t r = 0; r < mean->count; r++) {
        float share = mean->shares[r];
        take_strip(term, strips_at(mean->vectors[r], mean->size, bits), start, n, bits);
        for (int j = 0; j < n; j++)
            term[j] = share * term[j];
        if (r == 0)
            memcpy(acc, term, (size_t)n * 4);
        else
            for (int j = 0; j < n; j++)
                acc[j] = acc[j] + term[j];
    }
    most = greatest_of(acc, n);
    if (mean->wide) {
        memcpy(mean->out + start * 4, acc, (size_t)n * 4);
        return most < NOT_A_SCALE;
    }
    put_strip(strips_at(mean->out, mean->size, bits), start, acc, codes, n, bits, most);
    return most <= GREATEST_SCALED;
}

/* The mean of payloads of `size` elements, from `start` on: as float32 if `wide`, else in their
   encoding. */
INLINE int mean_of_strips(const StripMean *mean, Py_ssize_t start, int bits)
{
    const int strip = STRIP_OF(bits);
    int finite = 1;
    for (; start + strip <= mean->size; start += strip)
        finite &= mean_of_strip(mean, start, strip, bits);
    if (start < mean->size)
        finite &= mean_of_strip(mean, start, (int)(mean->size - start), bits);
    return finite;
}

#ifdef HAS_AVX2
#include "_strips_avx2.h"

/* Whole strips where the processor can, else none. */
#define IF_AVX2(call) (HAS_AVX2 ? (call) : 0)
#else
#define IF_AVX2(call) 0
#endif

/* The three passes, with a number of bits that the compiler knows. */
#define STRIP_PASSES(bits)                                                                         \
    static int narrow_##bits(char *out, const char *values, char *residual, Py_ssize_t n)          \
    {                                                                                              \
        int fits = 1;                                                                              \
        Py_ssize_t done = IF_AVX2(narrow_whole_##bits(out, values, residual, n, &fits));           \
        return narrow_strips(out, values, residual, n, done, bits) & fits;                         \
    }                                                                                              \
    static void widen_##bits(char *out, char *payload, Py_ssize_t n, Py_ssize_t start,             \
                             Py_ssize_t some)                                                      \
    {                                                                                              \
        Py_ssize_t done = IF_AVX2(widen_whole_##bits(out, payload, n, start, some));               \
        widen_strips(out, payload, n, start, some, done, bits);                                    \
    }                                                                                              \
    static int mean_##bits(const StripMean *mean)                                                  \
    {                                                                                              \
        int finite = 1;                                                                            \
        Py_ssize_t done = IF_AVX2(mean_whole_##bits(mean, &finite));                               \
        return finite && mean_of_strips(mean, done, bits);                                         \
    }

STRIP_PASSES(8)
STRIP_PASSES(4)
STRIP_PASSES(2)

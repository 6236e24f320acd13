/* Whole strips with AVX2, to the same bits as _strips.h, which includes this and does the rest. */

#define AVX2 __attribute__((target("avx2"), always_inline)) static inline
#define AVX2_PASS __attribute__((target("avx2"))) static

/* 32 codes at a time: strips are multiples of that. Codes are bytes meanwhile. */
#define SOME 32

AVX2 uint32_t greatest_of_strip_avx2(const char *numbers, int bits)
{
    __m256i most = _mm256_setzero_si256(), magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m128i half;
    for (int at = 0; at < STRIP_OF(bits) * 4; at += 32)
        most = _mm256_max_epi32(
            most, _mm256_and_si256(magnitude, _mm256_loadu_si256((void *)(numbers + at))));
    half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(half);
}

/* The codes of 32 numbers. */
AVX2 __m256i encode_avx2(const char *numbers, __m256 factor, int bits)
{
    const __m256i minus_zero = _mm256_set1_epi32((int)MINUS_ZERO);
    __m256i part[4], codes;
    for (int k = 0; k < 4; k++) {
        __m256 number = _mm256_loadu_ps((void *)(numbers + 32 * k));
        __m256i is_zero = _mm256_cmpeq_epi32(_mm256_castps_si256(number), minus_zero);
        /* The product is 0 there, so this makes it the lowest code. */
        part[k] = _mm256_or_si256(_mm256_cvtps_epi32(_mm256_mul_ps(number, factor)),
                                  _mm256_slli_epi32(is_zero, bits - 1));
    }
    /* Packing works in each half of a register, so the order is restored after it. */
    codes = _mm256_packs_epi16(_mm256_packs_epi32(part[0], part[1]),
                               _mm256_packs_epi32(part[2], part[3]));
    return _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Decodes the `k`-th eight of 32 codes; their scale is a true one. */
AVX2 __m256 decode_avx2(__m256i codes, int k, __m256 scale, int bits)
{
    __m128i half = k < 2 ? _mm256_castsi256_si128(codes) : _mm256_extracti128_si256(codes, 1);
    __m256i wide = _mm256_cvtepi8_epi32(k % 2 ? _mm_srli_si128(half, 8) : half);
    __m256i lowest = _mm256_cmpeq_epi32(wide, _mm256_set1_epi32(-GREATEST_CODE(bits) - 1));
    return _mm256_blendv_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(wide), scale), _mm256_set1_ps(-0.0f),
                            _mm256_castsi256_ps(lowest));
}

AVX2 void put_codes_avx2(char *to, __m256i codes, int bits)
{
    if (bits == 8) {
        _mm256_storeu_si256((void *)to, codes);
    } else if (bits == 2) {
        __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(3));
        /* Of each two bytes, the first and 4 times the second; of two of these sums, the first and
           16 times the second. Each is a byte by itself, in the lowest one of four. */
        __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(low, _mm256_set1_epi16(0x0401)),
                                          _mm256_set1_epi32(0x00100001));
        fours = _mm256_packus_epi32(fours, fours);
        fours = _mm256_packus_epi16(fours, fours);
        _mm_storel_epi64((void *)to, _mm_unpacklo_epi32(_mm256_castsi256_si128(fours),
                                                        _mm256_extracti128_si256(fours, 1)));
    } else {
        __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(0xF));
        /* Of each two bytes, the first and 16 times the second. */
        __m256i pairs = _mm256_maddubs_epi16(low, _mm256_set1_epi16(0x1001));
        pairs = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
        _mm_storeu_si128((void *)to, _mm256_castsi256_si128(pairs));
    }
}

AVX2 __m256i take_codes_avx2(const char *from, int bits)
{
    if (bits == 8) {
        return _mm256_loadu_si256((void *)from);
    } else if (bits == 2) {
        /* What the lower and the upper two bits of a half byte are. */
        const __m128i lower = _mm_setr_epi8(0, 1, -2, -1, 0, 1, -2, -1, 0, 1, -2, -1, 0, 1, -2, -1);
        const __m128i upper = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, -2, -2, -2, -2, -1, -1, -1, -1);
        __m128i bytes = _mm_loadl_epi64((void *)from), half = _mm_set1_epi8(0xF);
        __m128i halves = _mm_unpacklo_epi8(_mm_and_si128(bytes, half),
                                           _mm_and_si128(_mm_srli_epi16(bytes, 4), half));
        __m128i first = _mm_shuffle_epi8(lower, halves), second = _mm_shuffle_epi8(upper, halves);
        return _mm256_set_m128i(_mm_unpackhi_epi8(first, second),
                                _mm_unpacklo_epi8(first, second));
    } else {
        const __m256i eight = _mm256_set1_epi8(8);
        const __m128i lower = _mm_set1_epi8(0xF);
        __m128i bytes = _mm_loadu_si128((void *)from);
        __m128i low = _mm_and_si128(bytes, lower);
        __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), lower);
        __m256i codes = _mm256_set_m128i(_mm_unpackhi_epi8(low, high),
                                         _mm_unpacklo_epi8(low, high));
        return _mm256_sub_epi8(_mm256_xor_si256(codes, eight), eight);
    }
}

/* Puts a whole strip of `numbers`, whose greatest magnitude is `most`. */
AVX2 void put_strip_avx2(Strips out, Py_ssize_t start, const char *numbers, char *residual,
                         uint32_t most, int bits)
{
    float scale = scale_for(most, GREATEST_CODE(bits));
    __m256 scales = _mm256_set1_ps(scale), factors = _mm256_set1_ps(factor_for(scale));
    memcpy(out.scales + start / STRIP_OF(bits) * 4, &scale, sizeof scale);
    for (int at = 0; at < STRIP_OF(bits); at += SOME) {
        __m256i codes = encode_avx2(numbers + at * 4, factors, bits);
        for (int k = 0; residual != NULL && k < 4; k++) {
            __m256 number = _mm256_loadu_ps((void *)(numbers + at * 4 + 32 * k));
            __m256 lost = _mm256_sub_ps(number, decode_avx2(codes, k, scales, bits));
            _mm256_storeu_ps((void *)(residual + at * 4 + 32 * k), lost);
        }
        put_codes_avx2(out.codes + (start + at) * bits / 8, codes, bits);
    }
}

/* Each of these does whole strips, and returns the first element that it has not done. */

AVX2 Py_ssize_t narrow_strips_avx2(char *out, const char *values, char *residual, Py_ssize_t n,
                                   int bits, int *fits)
{
    Strips strips = strips_at(out, n, bits);
    Py_ssize_t start = 0;
    for (; start + STRIP_OF(bits) <= n; start += STRIP_OF(bits)) {
        const char *numbers = values + start * 4;
        uint32_t most = greatest_of_strip_avx2(numbers, bits);
        *fits &= most <= GREATEST_SCALED;
        put_strip_avx2(strips, start, numbers, residual ? residual + start * 4 : NULL, most, bits);
    }
    return start;
}

AVX2 Py_ssize_t widen_strips_avx2(char *out, char *payload, Py_ssize_t n, Py_ssize_t start,
                                  Py_ssize_t some, int bits)
{
    Strips strips = strips_at(payload, n, bits);
    float numbers[STRIP_MOST];
    Py_ssize_t done = 0;
    for (; done + STRIP_OF(bits) <= some; done += STRIP_OF(bits)) {
        float scale = scale_of(strips, start + done, bits);
        if (bits_of(scale) >= NOT_A_SCALE) {
            take_strip(numbers, strips, start + done, STRIP_OF(bits), bits);
            memcpy(out + done * 4, numbers, STRIP_OF(bits) * 4);
            continue;
        }
        for (int at = 0; at < STRIP_OF(bits); at += SOME) {
            const char *from = strips.codes + (start + done + at) * bits / 8;
            __m256i codes = take_codes_avx2(from, bits);
            for (int k = 0; k < 4; k++)
                _mm256_storeu_ps((void *)(out + (done + at) * 4 + 32 * k),
                                 decode_avx2(codes, k, _mm256_set1_ps(scale), bits));
        }
    }
    return done;
}

/* 32 elements of the mean, to `acc`. Returns whether all scales are true ones. */
AVX2 int mean_of_some_avx2(const StripMean *mean, char *acc, Py_ssize_t start, int bits)
{
    __m256 sums[4] = {0};
    for (Py_ssize_t r = 0; r < mean->count; r++) {
        Strips strips = strips_at(mean->vectors[r], mean->size, bits);
        float scale = scale_of(strips, start, bits);
        __m256i codes = take_codes_avx2(strips.codes + start * bits / 8, bits);
        __m256 scales = _mm256_set1_ps(scale), share = _mm256_set1_ps(mean->shares[r]);
        if (bits_of(scale) >= NOT_A_SCALE)
            return 0;
        for (int k = 0; k < 4; k++) {
            __m256 term = _mm256_mul_ps(share, decode_avx2(codes, k, scales, bits));
            sums[k] = r == 0 ? term : _mm256_add_ps(sums[k], term);
        }
    }
    for (int k = 0; k < 4; k++)
        _mm256_storeu_ps((void *)(acc + 32 * k), sums[k]);
    return 1;
}

AVX2 Py_ssize_t mean_of_strips_avx2(const StripMean *mean, int bits, int *finite)
{
    Strips out = strips_at(mean->out, mean->size, bits);
    Py_ssize_t start = 0;
    for (; *finite && start + STRIP_OF(bits) <= mean->size; start += STRIP_OF(bits)) {
        char room[STRIP_MOST * 4], *acc = mean->wide ? mean->out + start * 4 : room;
        uint32_t most;
        for (int at = 0; at < STRIP_OF(bits); at += SOME)
            *finite &= mean_of_some_avx2(mean, acc + at * 4, start + at, bits);
        most = greatest_of_strip_avx2(acc, bits);
        *finite &= most <= (mean->wide ? NOT_A_SCALE - 1 : GREATEST_SCALED);
        if (!mean->wide)
            put_strip_avx2(out, start, acc, NULL, most, bits);
    }
    return start;
}

#define WHOLE_STRIPS(bits)                                                                         \
    AVX2_PASS Py_ssize_t narrow_whole_##bits(char *out, const char *values, char *residual,        \
                                             Py_ssize_t n, int *fits)                              \
    {                                                                                              \
        /* Apart, so that the compiler need not ask in each strip. */                              \
        if (residual == NULL)                                                                      \
            return narrow_strips_avx2(out, values, NULL, n, bits, fits);                           \
        return narrow_strips_avx2(out, values, residual, n, bits, fits);                           \
    }                                                                                              \
    AVX2_PASS Py_ssize_t widen_whole_##bits(char *out, char *payload, Py_ssize_t n,                \
                                            Py_ssize_t start, Py_ssize_t some)                     \
    {                                                                                              \
        return widen_strips_avx2(out, payload, n, start, some, bits);                              \
    }                                                                                              \
    AVX2_PASS Py_ssize_t mean_whole_##bits(const StripMean *mean, int *finite)                     \
    {                                                                                              \
        return mean_of_strips_avx2(mean, bits, finite);                                            \
    }

WHOLE_STRIPS(8)
WHOLE_STRIPS(4)
WHOLE_STRIPS(2)

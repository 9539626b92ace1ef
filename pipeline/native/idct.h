/* Inverse DCT of a block to 8x8, 4x4 or 2x2 pixels, to the bit as jidctint.c and jidctred.c, eight lines at once. */

#pragma once
#include "entropy.h"
#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define SHUFFLE __builtin_shufflevector

typedef int32_t I32x8 __attribute__((vector_size(32)));
typedef int16_t I16x8 __attribute__((vector_size(16)));
typedef uint8_t U8x8 __attribute__((vector_size(8)));

INLINE I32x8 load_line(const int16_t *line) {
    I16x8 words;
    memcpy(&words, line, sizeof words);
    return __builtin_convertvector(words, I32x8);
}

INLINE U8x8 to_pixels(I32x8 line) {
#ifdef __AVX2__ /* GCC converts lane by lane */
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)line), _mm256_extracti128_si256((__m256i)line, 1));
    words = _mm_packus_epi16(_mm_adds_epi16(words, _mm_set1_epi16(128)), words);
    U8x8 pixels;
    _mm_storel_epi64((__m128i *)&pixels, words);
    return pixels;
#elif defined(__aarch64__)
    int32x4_t halves[2];
    memcpy(halves, &line, sizeof halves);
    int16x8_t words = vcombine_s16(vqmovn_s32(halves[0]), vqmovn_s32(halves[1]));
    return (U8x8)vqmovun_s16(vqaddq_s16(words, vdupq_n_s16(128)));
#else
    line += 128;
    line &= line >= 0;
    return __builtin_convertvector((line | (line > 255)) & 255, U8x8);
#endif
}

INLINE void transpose(I32x8 line[8]) {
    I32x8 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = SHUFFLE(line[i], line[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        a[i + 1] = SHUFFLE(line[i], line[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = SHUFFLE(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[i + 2 * j + 1] = SHUFFLE(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        line[i] = SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        line[i + 4] = SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* One dimension, to 8 and to 4 points. Constants have 13 fractional bits. */
INLINE void idct8(const I32x8 in[8], I32x8 out[8], int shift) {
    I32x8 z1 = (in[2] + in[6]) * 4433, even2 = z1 - in[6] * 15137, even3 = z1 + in[2] * 6270;
    I32x8 even0 = ((in[0] + in[4]) << 13) + (1 << (shift - 1)), even1 = ((in[0] - in[4]) << 13) + (1 << (shift - 1));
    I32x8 z5 = (in[7] + in[3] + in[5] + in[1]) * 9633;
    I32x8 z3 = z5 - (in[7] + in[3]) * 16069, z4 = z5 - (in[5] + in[1]) * 3196;
    z1 = (in[7] + in[1]) * -7373;
    I32x8 z2 = (in[5] + in[3]) * -20995;
    I32x8 odd0 = in[7] * 2446 + z1 + z3, odd1 = in[5] * 16819 + z2 + z4;
    I32x8 odd2 = in[3] * 25172 + z2 + z3, odd3 = in[1] * 12299 + z1 + z4;
    I32x8 even[4] = {even0 + even3, even1 + even2, even1 - even2, even0 - even3}, odd[4] = {odd3, odd2, odd1, odd0};
    for (int i = 0; i < 4; i++) {
        out[i] = (even[i] + odd[i]) >> shift;
        out[7 - i] = (even[i] - odd[i]) >> shift;
    }
}

INLINE void idct4(const I32x8 in[8], I32x8 out[4], int shift) {
    I32x8 mean = (in[0] << 14) + (1 << (shift - 1)), even = in[2] * 15137 - in[6] * 6270;
    I32x8 inner = in[7] * -1730 + in[5] * 11893 - in[3] * 17799 + in[1] * 8697;
    I32x8 outer = in[7] * -4176 - in[5] * 4926 + in[3] * 7373 + in[1] * 20995;
    out[0] = (mean + even + outer) >> shift;
    out[3] = (mean + even - outer) >> shift;
    out[1] = (mean - even + inner) >> shift;
    out[2] = (mean - even - inner) >> shift;
}

/* libjpeg-turbo's SIMD code adds and stores in 16 bits where 32 are needed for coefficients that no picture has, but a
 * damaged file can. Pixels are the same as long as nothing leaves 16 bits there. A Range collects what does here. */
typedef struct {
#ifdef __AVX2__
    __m256i low, high; /* of the first pass's results, saturated to 16 bits */
#endif
    int is_left;
} Range;

/* For 8x8 pixels the largest values are sums of two results of the first pass. A pass is an orthonormal transform times
 * sqrt(8), and the first has 2 fractional bits: those sums are at most 16 times the block's Euclidean norm. That of
 * 8-bit pixels is at most 1024, and quantisation adds at most 1020. Squares are those of values / 8, rounded down, so
 * that they fit: a norm of 248 there is one of at most 8 * 248 + 7 * 8 = 2040. */
enum { MAX_SQUARES = 248 * 248 };

INLINE void check_norm(const int16_t *block, Range *range) {
#ifdef __AVX2__
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < 64; i += 16) {
        __m256i words = _mm256_srai_epi16(_mm256_loadu_si256((const __m256i *)(block + i)), 3);
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(words, words));
    }
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_hadd_epi32(four, four);
    int sum = _mm_cvtsi128_si32(four) + _mm_extract_epi32(four, 1);
#else
    int sum = 0;
    for (int i = 0; i < 64; i++) sum += (block[i] >> 3) * (block[i] >> 3);
#endif
    range->is_left |= sum > MAX_SQUARES;
}

INLINE int is_left(const Range *range) {
#ifdef __AVX2__
    __m256i is_low = _mm256_cmpeq_epi16(range->low, _mm256_set1_epi16(-32768));
    __m256i is_high = _mm256_cmpeq_epi16(range->high, _mm256_set1_epi16(32767));
    if (!_mm256_testz_si256(_mm256_or_si256(is_low, is_high), _mm256_set1_epi16(-1))) return 1;
#endif
    return range->is_left;
}

/* A block to 8x8 pixels. */
INLINE void to_8x8(const int16_t *block, uint8_t *pixels, ptrdiff_t stride, Range *range) {
    I32x8 a[8], b[8];
    check_norm(block, range);
    for (int i = 0; i < 8; i++) a[i] = load_line(block + 8 * i);
    idct8(a, b, 11);
    transpose(b);
    idct8(b, a, 18);
    transpose(a);
    for (int i = 0; i < 8; i++) {
        U8x8 row = to_pixels(a[i]);
        memcpy(pixels + i * stride, &row, 8);
    }
}

/* The second pass to 2x2 pixels: one row. */
INLINE void write_2(const int16_t *in, uint8_t *pixels) {
    int mean = in[0] * (1 << 15) + (1 << 19), odd = in[7] * -5906 + in[5] * 6967 - in[3] * 10426 + in[1] * 29692;
    for (int x = 0; x < 2; x++) {
        int value = ((x ? mean - odd : mean + odd) >> 20) + 128;
        pixels[x] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}

#ifdef __AVX2__
/* Line `i` of two blocks, the left one in the low half. */
INLINE __m256i two_lines(const int16_t *blocks, int i) {
    __m128i left = _mm_loadu_si128((const __m128i *)(blocks + 8 * i));
    __m128i right = _mm_loadu_si128((const __m128i *)(blocks + BLOCK + 8 * i));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(left), right, 1);
}

INLINE __m256i factors(int first, int second) {
    return _mm256_set1_epi32((int)((uint32_t)(uint16_t)second << 16 | (uint16_t)first));
}

INLINE __m256i products(__m256i pairs, int first, int second) {
    return _mm256_madd_epi16(pairs, factors(first, second));
}

INLINE void note(Range *range, __m256i words) {
    range->low = _mm256_min_epi16(range->low, words);
    range->high = _mm256_max_epi16(range->high, words);
}

/* `idct4` of pairs of inputs (0, -), (2, 6), (7, 5) and (3, 1). */
INLINE void idct4_of_pairs(__m256i p0, __m256i p26, __m256i p75, __m256i p31, int shift, __m256i out[4]) {
    __m256i mean = _mm256_add_epi32(products(p0, 16384, 0), _mm256_set1_epi32(1 << (shift - 1)));
    __m256i even = products(p26, 15137, -6270);
    __m256i inner = _mm256_add_epi32(products(p75, -1730, 11893), products(p31, -17799, 8697));
    __m256i outer = _mm256_add_epi32(products(p75, -4176, -4926), products(p31, 7373, 20995));
    __m256i sum = _mm256_add_epi32(mean, even), difference = _mm256_sub_epi32(mean, even);
    out[0] = _mm256_srai_epi32(_mm256_add_epi32(sum, outer), shift);
    out[3] = _mm256_srai_epi32(_mm256_sub_epi32(sum, outer), shift);
    out[1] = _mm256_srai_epi32(_mm256_add_epi32(difference, inner), shift);
    out[2] = _mm256_srai_epi32(_mm256_sub_epi32(difference, inner), shift);
}

/* Two blocks to 4x4 pixels each. */
INLINE void to_4x4(const int16_t *blocks, uint8_t *left, uint8_t *right, ptrdiff_t stride, Range *range) {
    __m256i line[8], low[4], high[4], row[4];
    for (int i = 0; i < 8; i++) line[i] = two_lines(blocks, i);
    idct4_of_pairs(_mm256_unpacklo_epi16(line[0], line[0]), _mm256_unpacklo_epi16(line[2], line[6]),
                   _mm256_unpacklo_epi16(line[7], line[5]), _mm256_unpacklo_epi16(line[3], line[1]), 12, low);
    idct4_of_pairs(_mm256_unpackhi_epi16(line[0], line[0]), _mm256_unpackhi_epi16(line[2], line[6]),
                   _mm256_unpackhi_epi16(line[7], line[5]), _mm256_unpackhi_epi16(line[3], line[1]), 12, high);
    const __m256i to_pairs = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 0, 1, 4, 5, 12, 13, 14, 15, 10, 11, 6, 7, 2, 3));
    for (int i = 0; i < 4; i++) {
        row[i] = _mm256_packs_epi32(low[i], high[i]);
        note(range, row[i]);
        row[i] = _mm256_shuffle_epi8(row[i], to_pairs);
    }
    __m256i a = _mm256_unpacklo_epi32(row[0], row[1]), b = _mm256_unpacklo_epi32(row[2], row[3]);
    __m256i c = _mm256_unpackhi_epi32(row[0], row[1]), d = _mm256_unpackhi_epi32(row[2], row[3]);
    idct4_of_pairs(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b), _mm256_unpacklo_epi64(c, d),
                   _mm256_unpackhi_epi64(c, d), 19, low);
    __m256i half = _mm256_set1_epi16(128);
    a = _mm256_adds_epi16(_mm256_packs_epi32(low[0], low[1]), half);
    b = _mm256_adds_epi16(_mm256_packs_epi32(low[2], low[3]), half);
    const __m256i to_rows = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    a = _mm256_shuffle_epi8(_mm256_packus_epi16(a, b), to_rows);
    uint32_t pixels[8];
    _mm256_storeu_si256((__m256i *)pixels, a);
    for (int i = 0; i < 4; i++) {
        memcpy(left + i * stride, &pixels[i], 4);
        memcpy(right + i * stride, &pixels[4 + i], 4);
    }
}

/* Two blocks to 2x2 pixels each. */
INLINE void to_2x2(const int16_t *blocks, uint8_t *left, uint8_t *right, ptrdiff_t stride, Range *range) {
    __m256i line[8], zero = _mm256_setzero_si256(), rows[2];
    for (int i = 0; i < 8; i++) line[i] = two_lines(blocks, i);
    __m256i low = _mm256_add_epi32(products(_mm256_unpacklo_epi16(line[7], line[5]), -5906, 6967),
                                   products(_mm256_unpacklo_epi16(line[3], line[1]), -10426, 29692));
    __m256i high = _mm256_add_epi32(products(_mm256_unpackhi_epi16(line[7], line[5]), -5906, 6967),
                                    products(_mm256_unpackhi_epi16(line[3], line[1]), -10426, 29692));
    __m256i round = _mm256_set1_epi32(1 << 12);
    __m256i low_mean = _mm256_add_epi32(_mm256_srai_epi32(_mm256_unpacklo_epi16(zero, line[0]), 1), round);
    __m256i high_mean = _mm256_add_epi32(_mm256_srai_epi32(_mm256_unpackhi_epi16(zero, line[0]), 1), round);
    rows[0] = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(low_mean, low), 13),
                                 _mm256_srai_epi32(_mm256_add_epi32(high_mean, high), 13));
    rows[1] = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_sub_epi32(low_mean, low), 13),
                                 _mm256_srai_epi32(_mm256_sub_epi32(high_mean, high), 13));
    for (int y = 0; y < 2; y++) {
        /* Columns 2, 4 and 6 are not used. */
        note(range, _mm256_blend_epi16(rows[y], zero, 0x54));
        int16_t in[16];
        _mm256_storeu_si256((__m256i *)in, rows[y]);
        write_2(in, left + y * stride);
        write_2(in + 8, right + y * stride);
    }
}
#else
INLINE void note(Range *range, const int *results, int count) {
    for (int i = 0; i < count; i++) range->is_left |= results[i] <= -32768 || results[i] >= 32767;
}

/* Two blocks to 4x4 pixels each. */
INLINE void to_4x4(const int16_t *blocks, uint8_t *left, uint8_t *right, ptrdiff_t stride, Range *range) {
    I32x8 a[8], b[8] = {{0}};
    for (int block = 0; block < 2; block++) {
        for (int i = 0; i < 8; i++) a[i] = load_line(blocks + block * BLOCK + 8 * i);
        idct4(a, b + 4 * block, 12);
    }
    note(range, (const int *)b, 64);
    transpose(b); /* to columns; lanes are the four rows of the one block, then of the other */
    idct4(b, a, 19);
    for (int i = 4; i < 8; i++) a[i] = (I32x8){0};
    transpose(a);
    for (int i = 0; i < 4; i++) {
        U8x8 of_left = to_pixels(a[i]), of_right = to_pixels(a[i + 4]);
        memcpy(left + i * stride, &of_left, 4);
        memcpy(right + i * stride, &of_right, 4);
    }
}

/* Two blocks to 2x2 pixels each. */
INLINE void to_2x2(const int16_t *blocks, uint8_t *left, uint8_t *right, ptrdiff_t stride, Range *range) {
    for (int block = 0; block < 2; block++) {
        int16_t rows[2][8] = {{0}};
        for (int x = 0; x < 8; x += x ? 2 : 1) {
            const int16_t *in = blocks + block * BLOCK + x;
            int mean = in[0] * (1 << 15) + (1 << 12);
            int odd = in[56] * -5906 + in[40] * 6967 - in[24] * 10426 + in[8] * 29692;
            int results[2] = {(mean + odd) >> 13, (mean - odd) >> 13};
            note(range, results, 2);
            rows[0][x] = (int16_t)results[0];
            rows[1][x] = (int16_t)results[1];
        }
        for (int y = 0; y < 2; y++) write_2(rows[y], (block ? right : left) + y * stride);
    }
}
#endif

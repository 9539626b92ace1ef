/* Inverse DCT of a block to 8x8, 4x4 or 2x2 pixels, to the bit as jidctint.c and jidctred.c, eight lines at once. */

#pragma once
#include "entropy.h"
#ifdef __AVX2__
#include <immintrin.h>
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

/* A block to 8x8 pixels. */
INLINE void to_8x8(const int16_t *block, uint8_t *pixels, ptrdiff_t stride) {
    I32x8 a[8], b[8];
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

/* Two blocks to 4x4 pixels each. */
INLINE void to_4x4(const int16_t *blocks, uint8_t *left, uint8_t *right, ptrdiff_t stride) {
    I32x8 a[8], b[8] = {{0}};
    for (int block = 0; block < 2; block++) {
        for (int i = 0; i < 8; i++) a[i] = load_line(blocks + block * BLOCK + 8 * i);
        idct4(a, b + 4 * block, 12);
    }
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

/* A block to 2x2 pixels. */
INLINE void to_2x2(const int16_t *block, uint8_t *pixels, ptrdiff_t stride) {
    int columns[2][8];
    for (int x = 0; x < 8; x++) {
        const int16_t *in = block + x;
        int mean = in[0] * (1 << 15) + (1 << 12), odd = in[56] * -5906 + in[40] * 6967 - in[24] * 10426 + in[8] * 29692;
        columns[0][x] = (mean + odd) >> 13;
        columns[1][x] = (mean - odd) >> 13;
    }
    for (int y = 0; y < 2; y++) {
        const int *in = columns[y];
        int mean = in[0] * (1 << 15) + (1 << 19), odd = in[7] * -5906 + in[5] * 6967 - in[3] * 10426 + in[1] * 29692;
        for (int x = 0; x < 2; x++) {
            int value = ((x ? mean - odd : mean + odd) >> 20) + 128;
            pixels[y * stride + x] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
        }
    }
}

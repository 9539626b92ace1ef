/* From strips of decoded rows to what was asked for: a picture, or planes of another size. */

#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "entropy.h"
#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { MAX_STRIP_ROWS = 8, RING_ROWS = 16 };

/* Up to 8 rows of pixels as planes R, G and B, MAX_STRIP_ROWS * stride apart. */
typedef struct {
    uint8_t *planes;
    int stride, num_rows;
} Strip;

INLINE uint8_t to_byte(int value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

/* Y, Cb, Cr to R, G, B in place, a multiple of 16 pixels; jdcolor.c. */
static void to_rgb(uint8_t *restrict first, uint8_t *restrict second, uint8_t *restrict third, int num_pixels) {
    for (int i = 0; i < num_pixels; i += 16) {
#ifdef __AVX2__ /* the same in 16 bits: 1.402 is 1 + 0.402, 1.772 is 2 - 0.228, 0.71414 is 1 - 0.28586 */
        __m256i half = _mm256_set1_epi16(128), one = _mm256_set1_epi16(1);
        __m256i y = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(first + i)));
        __m256i cb = _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(second + i))), half);
        __m256i cr = _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(third + i))), half);
        __m256i cb2 = _mm256_add_epi16(cb, cb), cr2 = _mm256_add_epi16(cr, cr);
        __m256i red = _mm256_mulhi_epi16(cr2, _mm256_set1_epi16(26345));
        __m256i blue = _mm256_mulhi_epi16(cb2, _mm256_set1_epi16(-14942));
        red = _mm256_add_epi16(_mm256_srai_epi16(_mm256_add_epi16(red, one), 1), _mm256_add_epi16(y, cr));
        blue = _mm256_add_epi16(_mm256_srai_epi16(_mm256_add_epi16(blue, one), 1), _mm256_add_epi16(y, cb2));
        __m256i shares = _mm256_set1_epi32((int)((uint32_t)18734 << 16 | (uint16_t)-22554));
        __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(cb, cr), shares);
        __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(cb, cr), shares);
        low = _mm256_srai_epi32(_mm256_add_epi32(low, _mm256_set1_epi32(32768)), 16);
        high = _mm256_srai_epi32(_mm256_add_epi32(high, _mm256_set1_epi32(32768)), 16);
        __m256i green = _mm256_add_epi16(_mm256_packs_epi32(low, high), _mm256_sub_epi16(y, cr));
        __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi16(red, green), 0xD8);
        blue = _mm256_permute4x64_epi64(_mm256_packus_epi16(blue, blue), 0xD8);
        _mm_storeu_si128((__m128i *)(first + i), _mm256_castsi256_si128(both));
        _mm_storeu_si128((__m128i *)(second + i), _mm256_extracti128_si256(both, 1));
        _mm_storeu_si128((__m128i *)(third + i), _mm256_castsi256_si128(blue));
#else
        for (int j = i; j < i + 16; j++) {
            int y = first[j], cb = second[j] - 128, cr = third[j] - 128;
            first[j] = to_byte(y + ((91881 * cr + 32768) >> 16));
            second[j] = to_byte(y + ((-22554 * cb - 46802 * cr + 32768) >> 16));
            third[j] = to_byte(y + ((116130 * cb + 32768) >> 16));
        }
#endif
    }
}

typedef struct {
    uint8_t *pixels;
    ptrdiff_t stride;
    int width, top, bottom;
} Picture;

static void add_to_picture(void *user, const Strip *strip, int mcu_row) {
    const Picture *picture = user;
    for (int y = 0; y < strip->num_rows; y++) {
        int row = mcu_row * strip->num_rows + y;
        if (row < picture->top || row >= picture->bottom) continue;
        const uint8_t *restrict red = strip->planes + y * strip->stride;
        const uint8_t *restrict green = red + MAX_STRIP_ROWS * strip->stride;
        const uint8_t *restrict blue = green + MAX_STRIP_ROWS * strip->stride;
        uint8_t *restrict to = picture->pixels + row * picture->stride;
        for (int x = 0; x < picture->width; x++) {
            to[4 * x] = red[x];
            to[4 * x + 1] = green[x];
            to[4 * x + 2] = blue[x];
            to[4 * x + 3] = 255;
        }
    }
}

/* out = scale * in + offset for each axis, edge-origin, `in` being pixels of the scaled picture; output pixels outside
 * of [left, right) x [top, bottom) are black. */
typedef struct {
    double scale_x, offset_x, scale_y, offset_y;
    int32_t width, height, left, top, right, bottom;
    int64_t plane_stride, row_stride;
    uint8_t *planes;
} Resize;

/* Eight neighbouring output columns: 16 source columns from `start` on hold the two that each is made of. `pick` has
 * their places as 16-bit pairs, 0x80 for a zero byte (pshufb), `weight` what they weigh of 2^14. */
typedef struct {
    int32_t start;
    uint8_t pick[32];
    int16_t weight[16];
} Columns;

typedef struct {
    const Resize *wanted;
    Columns *columns;
    int num_groups, next, last_row; /* `next` counts rows in source order; last row of the scaled picture */
    int16_t *ring;                  /* rows resized to the output's width, 7 fractional bits: [row % RING_ROWS][3] */
    uint8_t *result;                /* [3][bottom - top][num_groups * 8], in source order */
} Resizing;

/* The source line before the centre of an output line, and the weight of the one after it, both within the source. */
INLINE int source_line(double scale, double offset, int line, int last, double *weight) {
    double place = (line + 0.5 - offset) / scale - 0.5;
    place = place < 0 ? 0 : place > last ? last : place;
    int before = (int)place;
    *weight = place - before;
    return before;
}

static int plan_columns(Resizing *resizing, int last_column) {
    const Resize *wanted = resizing->wanted;
    for (int g = 0; g < resizing->num_groups; g++) {
        Columns *columns = &resizing->columns[g];
        int before[8];
        columns->start = last_column;
        for (int i = 0; i < 8; i++) {
            int x = wanted->left + 8 * g + i;
            double weight;
            before[i] = source_line(wanted->scale_x, wanted->offset_x, x < wanted->right ? x : wanted->right - 1,
                                    last_column, &weight);
            columns->weight[2 * i + 1] = (int16_t)lrint(weight * 16384);
            columns->weight[2 * i] = (int16_t)(16384 - columns->weight[2 * i + 1]);
            if (before[i] < columns->start) columns->start = before[i];
        }
        for (int i = 0; i < 8; i++) {
            int first = before[i] - columns->start, second = first + (before[i] < last_column);
            if (second > 15) return NOT_MINE;
            memcpy(columns->pick + 4 * i, (uint8_t[]){(uint8_t)first, 0x80, (uint8_t)second, 0x80}, 4);
        }
    }
    return DONE;
}

static void resize_row(const Resizing *resizing, const uint8_t *row, int16_t *restrict to) {
    for (int g = 0; g < resizing->num_groups; g++, to += 8) {
        const Columns *columns = &resizing->columns[g];
        const uint8_t *from = row + columns->start;
#ifdef __AVX2__
        __m256i pairs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from));
        pairs = _mm256_shuffle_epi8(pairs, _mm256_loadu_si256((const __m256i *)columns->pick));
        __m256i sums = _mm256_madd_epi16(pairs, _mm256_loadu_si256((const __m256i *)columns->weight));
        sums = _mm256_srai_epi32(_mm256_add_epi32(sums, _mm256_set1_epi32(64)), 7);
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        _mm_storeu_si128((__m128i *)to, words);
#elif defined(__aarch64__)
        int16x4_t halves[2];
        for (int half = 0; half < 2; half++) { /* a place of 0x80 gives a zero, as pshufb does */
            uint8x16_t pairs = vqtbl1q_u8(vld1q_u8(from), vld1q_u8(columns->pick + 16 * half));
            int16x8_t words = vreinterpretq_s16_u8(pairs), weights = vld1q_s16(columns->weight + 8 * half);
            int32x4_t first = vmull_s16(vget_low_s16(words), vget_low_s16(weights));
            int32x4_t sums = vpaddq_s32(first, vmull_high_s16(words, weights));
            halves[half] = vrshrn_n_s32(sums, 7);
        }
        vst1q_s16(to, vcombine_s16(halves[0], halves[1]));
#else
        for (int i = 0; i < 8; i++)
            to[i] = (int16_t)((from[columns->pick[4 * i]] * columns->weight[2 * i] +
                               from[columns->pick[4 * i + 2]] * columns->weight[2 * i + 1] + 64) >> 7);
#endif
    }
}

static void mix_rows(const int16_t *restrict above, const int16_t *restrict below, double weight, uint8_t *restrict to,
                     int width) {
    int16_t share = (int16_t)lrint(weight * 32767);
    for (int x = 0; x < width; x++) {
        int16_t step = (int16_t)(((((int16_t)(below[x] - above[x])) * share >> 14) + 1) >> 1);
        to[x] = (uint8_t)((int16_t)(above[x] + step + 64) >> 7);
    }
}

static void add_to_output(void *user, const Strip *strip, int mcu_row) {
    Resizing *resizing = user;
    const Resize *wanted = resizing->wanted;
    int width = 8 * resizing->num_groups, num_lines = wanted->bottom - wanted->top;
    int first = mcu_row * strip->num_rows, stop = first + strip->num_rows;
    if (stop > resizing->last_row) stop = resizing->last_row + 1;
    for (int row = first; row < stop; row++)
        for (int c = 0; c < 3; c++)
            resize_row(resizing, strip->planes + (c * MAX_STRIP_ROWS + row - first) * strip->stride,
                       resizing->ring + (row % RING_ROWS * 3 + c) * width);
    for (; resizing->next < num_lines; resizing->next++) {
        double weight;
        int line = wanted->scale_y > 0 ? wanted->top + resizing->next : wanted->bottom - 1 - resizing->next;
        int above = source_line(wanted->scale_y, wanted->offset_y, line, resizing->last_row, &weight);
        int below = above < resizing->last_row ? above + 1 : above;
        if (below >= stop) break;
        for (int c = 0; c < 3; c++)
            mix_rows(resizing->ring + (above % RING_ROWS * 3 + c) * width,
                     resizing->ring + (below % RING_ROWS * 3 + c) * width, weight,
                     resizing->result + ((size_t)c * num_lines + (line - wanted->top)) * width, width);
    }
}

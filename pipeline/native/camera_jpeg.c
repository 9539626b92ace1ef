/* Decodes camera JPEGs at 1/2 or 1/4 and resamples them to planes in one pass, one row of MCUs after the other.
 *
 * It takes what cameras write: baseline, 8-bit, 4:2:0, one scan, a restart marker at each row of MCUs or none. All else
 * and every irregularity is answered with NOT_MINE, never guessed at; the caller then asks libjpeg-turbo. What it does
 * take it decodes to the very bytes of libjpeg-turbo's accurate integer IDCT (jidctint.c, jidctred.c, jdcolor.c).
 * It is faster because
 *   - two Huffman symbols are decoded with one look at a table, and values come from the table too;
 *   - rows that nobody wants are read, not transformed; with restart markers they are not even read;
 *   - a row of MCUs is converted, resampled and dropped while it lies in the first-level cache.
 *
 * Nothing is allocated here, nothing is global: callers give a zeroed Context a thread, which keeps Huffman tables from
 * image to image, and scratch memory. References: ITU-T T.81, annexes B, F and K.
 */

#ifdef __AVX2__
#include <cpuid.h>
#endif
#include "entropy.h"
#include "idct.h"
#include "memory.h"
#include "output.h"

#ifndef SOURCE_CRC
#define SOURCE_CRC 0 /* of these files: the binding refuses a library that was built from others */
#endif

enum { MCU = 16 };

typedef struct {
    int width, height, num_columns, num_rows; /* pixels; MCUs */
    int has_restarts;
    int dc[3], ac[3]; /* identifiers of Huffman tables */
    int16_t quant[3][64];
    const uint8_t *scan, *end;
} File;

static int read_header(File *file, Context *context, const uint8_t *data, size_t size) {
    const uint8_t *at = data + 2, *quant[2] = {NULL}, *frame = NULL;
    int is_jfif = 0, has_adobe = 0, has_table[2][2] = {{0}}, restart_interval = 0;
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return NOT_MINE;
    file->end = data + size;
    for (;;) {
        if (file->end - at < 4 || at[0] != 0xFF) return NOT_MINE;
        int marker = at[1], length = at[2] << 8 | at[3];
        const uint8_t *body = at + 4, *next = at + 2 + length;
        if (length < 2 || file->end - at < 2 + length) return NOT_MINE;
        length -= 2;
        if (marker == 0xDA) {
            if (!frame || length != 10 || body[0] != 3 || body[7] != 0 || body[8] != 63 || body[9] != 0)
                return NOT_MINE;
            for (int c = 0; c < 3; c++) {
                int dc = body[2 + 2 * c] >> 4, ac = body[2 + 2 * c] & 15, table = frame[8 + 3 * c];
                if (body[1 + 2 * c] != frame[6 + 3 * c] || dc > 1 || ac > 1 || table > 1) return NOT_MINE;
                if (!has_table[0][dc] || !has_table[1][ac] || !quant[table]) return NOT_MINE;
                file->dc[c] = dc;
                file->ac[c] = ac;
                for (int i = 0; i < 64; i++) file->quant[c][i] = quant[table][i];
            }
            file->scan = next;
            break;
        }
        if (marker == 0xC0) {
            if (frame || length != 15 || body[0] != 8 || body[5] != 3) return NOT_MINE;
            if (body[7] != 0x22 || body[10] != 0x11 || body[13] != 0x11) return NOT_MINE;
            frame = body;
        } else if (marker == 0xDB) {
            for (; next - body >= 65; body += 65) {
                if (body[0] > 1) return NOT_MINE;
                quant[body[0]] = body + 1;
            }
            if (body != next) return NOT_MINE;
        } else if (marker == 0xC4) {
            while (next - body > 17) {
                int kind = body[0] >> 4, identifier = body[0] & 15, num_symbols = 0;
                for (int i = 1; i <= 16; i++) num_symbols += body[i];
                if (kind > 1 || identifier > 1 || num_symbols > 256 || next - body < 17 + num_symbols) return NOT_MINE;
                if (build(&context->tables[kind][identifier], body + 1, body + 17, num_symbols, kind)) return NOT_MINE;
                has_table[kind][identifier] = 1;
                body += 17 + num_symbols;
            }
            if (body != next) return NOT_MINE;
        } else if (marker == 0xDD) {
            if (length != 2) return NOT_MINE;
            restart_interval = body[0] << 8 | body[1];
        } else if (marker >= 0xE0 && marker <= 0xEF) {
            if (marker == 0xE0 && length >= 14 && !memcmp(body, "JFIF", 5)) {
                if (body[5] != 1) return NOT_MINE; /* libjpeg warns of other versions */
                is_jfif = 1;
            }
            has_adobe |= marker == 0xEE;
        } else if (marker != 0xFE)
            return NOT_MINE;
        at = next;
    }
    /* libjpeg's guess, default_decompress_parms in jdapimin.c: these are YCbCr, others may be. */
    if (!is_jfif && (has_adobe || frame[6] != 1 || frame[9] != 2 || frame[12] != 3)) return NOT_MINE;
    file->height = frame[1] << 8 | frame[2];
    file->width = frame[3] << 8 | frame[4];
    file->num_columns = (file->width + MCU - 1) / MCU;
    file->num_rows = (file->height + MCU - 1) / MCU;
    file->has_restarts = restart_interval != 0;
    return restart_interval && restart_interval != file->num_columns ? NOT_MINE : DONE;
}

/* --- Rows of MCUs --- */

INLINE int read_mcu(const File *file, const Context *context, Reader *reader, int *level, int16_t *blocks,
                    unsigned *last) {
    for (int b = 0; b < 6; b++) {
        int c = b < 4 ? 0 : b - 3;
        const Huffman *dc = &context->tables[0][file->dc[c]], *ac = &context->tables[1][file->ac[c]];
        int16_t *block = blocks + b * BLOCK;
        last[b] = read_block(reader, dc, ac, file->quant[c], &level[c], block, 0);
        if (UNLIKELY(last[b] > 63))
            last[b] = read_block_one_by_one(reader, dc, ac, file->quant[c], &level[c], block);
        if (last[b] > 63) return NOT_MINE;
    }
    return DONE;
}

INLINE void transform_mcu(const int16_t *blocks, const unsigned *last, uint8_t *luma, const Strip *strip,
                          Range *range) {
    ptrdiff_t stride = strip->stride, plane = MAX_STRIP_ROWS * stride;
    uint8_t *chroma[2] = {luma + plane, luma + 2 * plane};
    if (strip->num_rows == 8) {
        to_4x4(blocks, luma, luma + 4, stride, range);
        to_4x4(blocks + 2 * BLOCK, luma + 4 * stride, luma + 4 * stride + 4, stride, range);
        for (int c = 0; c < 2; c++) {
            const int16_t *block = blocks + (4 + c) * BLOCK;
            if (last[4 + c]) {
                to_8x8(block, chroma[c], stride, range);
                continue;
            }
            range->is_left |= block[0] < -8191 || block[0] > 8191;
            U8x8 row = to_pixels((I32x8){0} + (((block[0] << 2) + 16) >> 5)); /* both passes of a lone mean */
            for (int y = 0; y < 8; y++) memcpy(chroma[c] + y * stride, &row, 8);
        }
    } else {
        to_2x2(blocks, luma, luma + 2, stride, range);
        to_2x2(blocks + 2 * BLOCK, luma + 2 * stride, luma + 2 * stride + 2, stride, range);
        to_4x4(blocks + 4 * BLOCK, chroma[0], chroma[1], stride, range);
    }
}

typedef struct {
    int first, last; /* rows of MCUs [first, last) */
} Rows;

/* Reads the scan to its end and hands strips of the rows of MCUs `wanted` to `use`, with the number of each. With
 * restart markers only the rows `checked`, which include the wanted ones, are decoded. */
static int read_scan(const File *file, Context *context, int factor, Rows wanted, Rows checked, Scratch scratch,
                     void (*use)(void *user, const Strip *strip, int mcu_row), void *user) {
    Strip strip = {NULL, (file->num_columns * MCU / factor + 63) & ~31, MCU / factor}; /* 32 spare columns and more */
    uint8_t *bytes = take(&scratch, (size_t)(file->end - file->scan) + PADDING);
    strip.planes = take(&scratch, 3 * MAX_STRIP_ROWS * (size_t)strip.stride);
    if (!bytes || !strip.planes) return NOT_MINE;
    int16_t coefficients[6 * BLOCK] = {0};
    unsigned ends[6];
    Rows passed = file->has_restarts ? checked : (Rows){0, file->num_rows};
    int has_others = passed.first < wanted.first || passed.last > wanted.last;
    Block blocks[6];
    for (int b = 0; b < 6; b++) {
        int c = b < 4 ? 0 : b - 3, dc = file->dc[c], ac = file->ac[c];
        Steps *steps = &context->steps[dc][ac];
        blocks[b] = (Block){.tables = {&context->tables[0][dc], &context->tables[1][ac]},
                            .steps = {steps->steps[0], steps->steps[1]},
                            .next = &blocks[(b + 1) % 6],
                            .component = c};
        if (has_others) make_steps(steps, blocks[b].tables);
    }
    int level[3] = {0};
    const uint8_t *at = file->scan, *segment_end = NULL;
    Reader reader = {0};
    Range range = {0};
    for (int row = 0; row < file->num_rows; row++) {
        int is_wanted = row >= wanted.first && row < wanted.last;
        int is_checked = row >= checked.first && row < checked.last;
        if (row == 0 || file->has_restarts) {
            uint8_t *to = is_checked || !file->has_restarts ? bytes : NULL;
            int marker, expected = file->has_restarts && row < file->num_rows - 1 ? 0xD0 | (row & 7) : 0xD9;
            at = copy_segment(at, file->end, &to, &marker);
            if (!at || marker != expected) return NOT_MINE;
            if (!to) continue;
            memset(to, 0, PADDING);
            segment_end = to;
            reader = (Reader){0, 0, bytes};
            level[0] = level[1] = level[2] = 0;
        }
        if (!is_wanted && pass_blocks(&reader, blocks, 6 * file->num_columns, level, segment_end + 8)) return NOT_MINE;
        for (int column = 0; is_wanted && column < file->num_columns; column++) {
            if (reader.at > segment_end + 8) return NOT_MINE; /* so that an MCU never reads beyond the padding */
            if (read_mcu(file, context, &reader, level, coefficients, ends)) return NOT_MINE;
            transform_mcu(coefficients, ends, strip.planes + column * strip.num_rows, &strip, &range);
            memset(coefficients, 0, sizeof coefficients);
        }
        if (row == file->num_rows - 1 || file->has_restarts) { /* all bytes are used, and no more */
            if ((bits_read(&reader, bytes) + 7) / 8 != segment_end - bytes) return NOT_MINE;
        }
        if (is_left(&range)) return NOT_MINE;
        if (is_wanted) {
            size_t plane = MAX_STRIP_ROWS * (size_t)strip.stride;
            to_rgb(strip.planes, strip.planes + plane, strip.planes + 2 * plane, strip.num_rows * strip.stride);
            use(user, &strip, row);
        }
    }
    /* splice.py, which cuts the same rows out where this library is absent, wants the end within the last 16 bytes. */
    if (file->has_restarts && (file->end - at > 14 || memchr(at, 0xFF, (size_t)(file->end - at)))) return NOT_MINE;
    return DONE;
}

/* --- Entry points --- */

/* All of these are for one thread at a time with the same context and scratch memory. Sizes in pixels are what the
 * caller believes; a file that says otherwise is NOT_MINE. */

uint32_t camera_jpeg_source_crc(void) { return SOURCE_CRC; }

size_t camera_jpeg_context_bytes(void) { return sizeof(Context); }

/* Whether this processor has what the library was compiled for: x86-64-v3, see build.py. Clang 14 has no names for three
 * of its features, which CPUID tells: MOVBE, F16C and LZCNT. */
int camera_jpeg_runs_here(void) {
#ifdef __AVX2__
    unsigned a, b, basic, extended, d;
    if (!__get_cpuid(1, &a, &b, &basic, &d) || !__get_cpuid(0x80000001, &a, &b, &extended, &d)) return 0;
    int has_cpuid = (basic & bit_MOVBE) && (basic & bit_F16C) && (extended & bit_LZCNT);
    return has_cpuid && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

/* Scratch memory for a file of `num_bytes`, `width` pixels wide, that is resized to `out_width` x `out_height`. */
size_t camera_jpeg_scratch_bytes(size_t num_bytes, int width, int out_width, int out_height) {
    size_t groups = (size_t)out_width / 8 + 1, stride = (size_t)width + 128;
    size_t resizing = groups * (sizeof(Columns) + RING_ROWS * 3 * 8 * sizeof(int16_t) + 3 * 8 * (size_t)out_height);
    return num_bytes + PADDING + 3 * MAX_STRIP_ROWS * stride + resizing + 8 * ALIGNMENT;
}

static int open_file(File *file, Context *context, const uint8_t *data, size_t size, int width, int height,
                     int factor) {
    if ((factor != 2 && factor != 4) || read_header(file, context, data, size)) return NOT_MINE;
    return file->width == width && file->height == height && width > 0 && height > 0 ? DONE : NOT_MINE;
}

/* Decodes at 1/factor and writes the rows [top, bottom) of the scaled picture as RGBX into their places of `pixels`. */
int camera_jpeg_picture(Context *context, uint8_t *scratch, size_t scratch_bytes, const uint8_t *data, size_t size,
                        int width, int height, int factor, int top, int bottom, uint8_t *pixels, ptrdiff_t stride) {
    File file;
    if (open_file(&file, context, data, size, width, height, factor)) return NOT_MINE;
    int num_rows = (height + factor - 1) / factor, strip_rows = MCU / factor;
    if (top < 0 || bottom <= top || bottom > num_rows) return NOT_MINE;
    Picture picture = {pixels, stride, (width + factor - 1) / factor, top, bottom};
    Rows rows = {top / strip_rows, (bottom - 1) / strip_rows + 1};
    return read_scan(&file, context, factor, rows, rows, (Scratch){scratch, scratch + scratch_bytes}, add_to_picture,
                     &picture);
}

/* A file to decode at 1/factor and to resample. */
typedef struct {
    const uint8_t *data;
    size_t size;
    int32_t width, height, factor, declined;
    Resize wanted;
} Job;

static int resized(Context *context, Scratch memory, const Job *job) {
    File file;
    int width = job->width, height = job->height, factor = job->factor;
    if (open_file(&file, context, job->data, job->size, width, height, factor)) return NOT_MINE;
    const Resize *wanted = &job->wanted;
    int num_columns = wanted->right - wanted->left, num_lines = wanted->bottom - wanted->top;
    if (wanted->left < 0 || wanted->top < 0 || num_columns <= 0 || num_lines <= 0 || wanted->right > wanted->width ||
        wanted->bottom > wanted->height)
        return NOT_MINE;
    int num_groups = (num_columns + 7) / 8, num_rows = (height + factor - 1) / factor, strip_rows = MCU / factor;
    Resizing resizing = {wanted, NULL, num_groups, 0, num_rows - 1, NULL, NULL};
    resizing.columns = take(&memory, (size_t)num_groups * sizeof(Columns));
    resizing.ring = take(&memory, (size_t)num_groups * (8 * RING_ROWS * 3 * sizeof(int16_t)));
    resizing.result = take(&memory, (size_t)num_groups * 8 * 3 * (size_t)num_lines);
    if (!resizing.columns || !resizing.ring || !resizing.result) return NOT_MINE;
    if (plan_columns(&resizing, (width + factor - 1) / factor - 1)) return NOT_MINE;
    double weight;
    int first = source_line(wanted->scale_y, wanted->offset_y, wanted->top, num_rows - 1, &weight);
    int last = source_line(wanted->scale_y, wanted->offset_y, wanted->bottom - 1, num_rows - 1, &weight);
    int low = first < last ? first : last, high = first < last ? last : first;
    high += high < num_rows - 1;
    Rows rows = {low / strip_rows, high / strip_rows + 1};
    /* What turbo.py reads without this library begins up to one pixel row before these, and ends up to two after. */
    Rows checked = {(low > 0 ? low - 1 : 0) / strip_rows, (high + 2) / strip_rows + 1};
    if (read_scan(&file, context, factor, rows, checked, memory, add_to_output, &resizing) ||
        resizing.next != num_lines)
        return NOT_MINE;
    for (int c = 0; c < 3; c++)
        for (int y = 0; y < wanted->height; y++) {
            uint8_t *row = wanted->planes + c * wanted->plane_stride + y * wanted->row_stride;
            if (y < wanted->top || y >= wanted->bottom) {
                memset(row, 0, (size_t)wanted->width);
                continue;
            }
            memset(row, 0, (size_t)wanted->left);
            memcpy(row + wanted->left, resizing.result + ((size_t)c * num_lines + y - wanted->top) * num_groups * 8,
                   (size_t)num_columns);
            memset(row + wanted->right, 0, (size_t)(wanted->width - wanted->right));
        }
    return DONE;
}

/* Decodes files one after another and writes their resampled planes: those of a file that is declined are untouched. */
void camera_jpeg_resized(Context *context, uint8_t *scratch, size_t scratch_bytes, Job *jobs, int num_jobs) {
    for (Job *job = jobs; job < jobs + num_jobs; job++)
        job->declined = resized(context, (Scratch){scratch, scratch + scratch_bytes}, job);
}

/* Cuts rows of MCUs out of JPEGs with a restart marker at each row, a whole batch a call; splice.py has the rules.
 *
 * The markers are searched for in the data, 32 bytes a step with AVX2, else by memchr: that costs about as much as copying the rows, and is exact
 * whatever the file went through since an index was written. ITU-T T.81: markers count D0 to D7 from D0 (E.1.4).
 */

#ifdef __AVX2__
#include <immintrin.h>
#endif
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct { /* 11 numbers a file; splice.py fills the table */
    int64_t data, size;          /* address, bytes */
    int64_t room;                /* address of at least size + 2 bytes for the result */
    int64_t frame_at, scan_at;   /* of the frame header's marker, of the entropy-coded data */
    int64_t num_components;      /* of the frame */
    int64_t num_rows;            /* of MCUs */
    int64_t first, last;         /* rows to keep: [first, last) */
    int64_t height;              /* pixels of these */
    int64_t num_bytes;           /* result: bytes written; 0 where the file cannot be cut */
} RestartRows;

enum { MAX_ROWS = 65535 / 8 + 1, TAIL = 16 };

/* Write the places of the restart markers; return their number, or -1 if they do not count or are too many. */
static int find_markers(const uint8_t *data, int64_t at, int64_t size, int64_t *places, int wanted) {
    int found = 0;
    while (at + 1 < size) {
        uint32_t hits;
        int64_t step = 1;
#ifdef __AVX2__
        if (at + 33 <= size) {
            const __m256i all = _mm256_set1_epi8((char)0xFF), high = _mm256_set1_epi8((char)0xF8);
            const __m256i restart = _mm256_set1_epi8((char)0xD0);
            __m256i here = _mm256_loadu_si256((const __m256i *)(data + at));
            __m256i next = _mm256_loadu_si256((const __m256i *)(data + at + 1));
            __m256i is_marker = _mm256_and_si256(_mm256_cmpeq_epi8(here, all),
                                                 _mm256_cmpeq_epi8(_mm256_and_si256(next, high), restart));
            hits = (uint32_t)_mm256_movemask_epi8(is_marker);
            step = 32;
        } else
#endif
        {
            const uint8_t *marker = memchr(data + at, 0xFF, (size_t)(size - 1 - at));
            if (!marker) break;
            at = marker - data;
            hits = (data[at + 1] & 0xF8) == 0xD0;
        }
        for (; hits; hits &= hits - 1) {
            int64_t place = at + __builtin_ctz(hits);
            if (found == wanted || (data[place + 1] & 7) != (found & 7)) return -1;
            places[found++] = place;
        }
        at += step;
    }
    return found;
}

static int64_t cut(const RestartRows *file, int64_t *markers) {
    const uint8_t *data = (const uint8_t *)(uintptr_t)file->data;
    uint8_t *out = (uint8_t *)(uintptr_t)file->room;
    int64_t size = file->size, scan_at = file->scan_at;
    int wanted = (int)file->num_rows - 1, has_end = 0;
    if (file->num_rows > MAX_ROWS || size < TAIL) return 0;
    if (data[scan_at - 2 * file->num_components - 4] != file->num_components) return 0;
    for (const uint8_t *at = data + size - TAIL; at < data + size - 1; at++) has_end |= at[0] == 0xFF && at[1] == 0xD9;
    if (!has_end || find_markers(data, scan_at, size, markers, wanted) != wanted) return 0;
    int64_t start = file->first ? markers[file->first - 1] + 2 : scan_at;
    int64_t end = file->last < file->num_rows ? markers[file->last - 1] : size;
    int64_t num_bytes = scan_at + end - start;
    memcpy(out, data, (size_t)scan_at);
    memcpy(out + scan_at, data + start, (size_t)(end - start));
    if (file->last < file->num_rows) {
        out[num_bytes++] = 0xFF;
        out[num_bytes++] = 0xD9;
    }
    out[file->frame_at + 5] = (uint8_t)(file->height >> 8);
    out[file->frame_at + 6] = (uint8_t)file->height;
    for (int64_t row = file->first; row + 1 < file->last; row++)
        out[markers[row] + scan_at - start + 1] = (uint8_t)(0xD0 + ((row - file->first) & 7));
    return num_bytes;
}

void restart_rows_cut(RestartRows *files, int count) {
    int64_t markers[MAX_ROWS];
    for (int at = 0; at < count; at++) files[at].num_bytes = cut(&files[at], markers);
}

/* Writes a baseline JPEG again with a restart marker after each row of MCUs.
 *
 * The bits of its symbols are copied as they are, but those of the DC levels that follow a marker: these are told from
 * zero there (T.81 F.2.1.3.1), and are written again. Pixels stay, and so do the Huffman tables and all other segments
 * of the header; a DC table without codes for some levels gets them, longer than its own. What comes after the image's
 * end is dropped.
 *
 * LEFT is the answer for what is not baseline with all components in one scan, and for a scan with stray bytes that a
 * decoder may pass over; a damaged file is named by its fault. References: ITU-T T.81, annexes B, E and F.
 */

#include "memory.h"

enum { MAX_BLOCKS = 10, MAX_ROWS = 65535 / 8 + 1, STRAY_BYTES = 7 }; /* blocks of an MCU; rows of MCUs */
enum { CHUNK_BYTES = 4096, SCAN_PADDING = 64 }; /* the latter can be read behind a segment */
enum { NUM_SIZES = 12, MAX_LEVEL = 2047 }; /* sizes of DC differences, table F.1, and the largest of them */
enum { LEFT = 0, BROKEN_HEADER = -1, CUT_SHORT = -2, NO_SUCH_CODE = -3, TOO_LARGE = -4, WRONG_MARKER = -5 };
enum { OK = 1 };

typedef struct {
    int num_columns, num_rows; /* of MCUs */
    int num_blocks, num_components;
    uint8_t component[MAX_BLOCKS]; /* of each block of an MCU */
    uint8_t dc[4], ac[4];          /* identifiers of Huffman tables, by component */
    int64_t restart_interval;      /* MCUs of a segment */
    const uint8_t *scan_header, *scan, *end;
} Source;

typedef struct { /* of a Huffman table, by size of the difference */
    uint8_t length[NUM_SIZES];
    uint16_t bits[NUM_SIZES];
} Codes;

typedef struct { /* the bytes of the result, and the bits that are not a byte yet, first one highest */
    uint8_t *at, *end;
    uint64_t bits;
    unsigned num_bits, is_full;
} Writer;

static void put_bytes(Writer *to, const uint8_t *bytes, size_t num_bytes) {
    if ((size_t)(to->end - to->at) < num_bytes) {
        to->is_full = 1;
        return;
    }
    memcpy(to->at, bytes, num_bytes);
    to->at += num_bytes;
}

static void put_stuffed(Writer *to, const uint8_t *bytes, size_t num_bytes) { /* a zero follows each 0xFF */
    for (const uint8_t *end = bytes + num_bytes; bytes < end;) {
        const uint8_t *found = memchr(bytes, 0xFF, (size_t)(end - bytes));
        put_bytes(to, bytes, (size_t)((found ? found + 1 : end) - bytes));
        if (found) put_bytes(to, (uint8_t[]){0}, 1);
        bytes = found ? found + 1 : end;
    }
}

/* Copies the bits [from, end) of `bytes`, behind which eight bytes more can be read. */
static void put_bits(Writer *to, const uint8_t *bytes, ptrdiff_t from, ptrdiff_t end) {
    uint8_t chunk[CHUNK_BYTES], *at = chunk;
    while (from < end) {
        unsigned length = end - from < 56 ? (unsigned)(end - from) : 56;
        uint64_t next;
        memcpy(&next, bytes + (from >> 3), 8);
        next = __builtin_bswap64(next) << (from & 7) & ~(~(uint64_t)0 >> length);
        to->bits |= next >> to->num_bits;
        to->num_bits += length;
        uint64_t word = __builtin_bswap64(to->bits);
        memcpy(at, &word, 8);
        at += to->num_bits >> 3;
        to->bits <<= to->num_bits & ~7u;
        to->num_bits &= 7;
        from += length;
        if (at > chunk + CHUNK_BYTES - 8) {
            put_stuffed(to, chunk, (size_t)(at - chunk));
            at = chunk;
        }
    }
    put_stuffed(to, chunk, (size_t)(at - chunk));
}

/* Writes how a DC level differs from the one before, F.1.2.1. */
static int put_difference(Writer *to, const Codes *codes, int difference) {
    int sign = difference >> 31;
    unsigned magnitude = (unsigned)((difference ^ sign) - sign);
    if (magnitude > MAX_LEVEL) return TOO_LARGE;
    unsigned size = 31 - (unsigned)__builtin_clz(magnitude << 1 | 1), length = codes->length[size] + size;
    uint32_t bits = (uint32_t)codes->bits[size] << size | ((unsigned)(difference + sign) & ((1u << size) - 1));
    uint64_t word = __builtin_bswap64((uint64_t)bits << (64 - length));
    uint8_t bytes[8];
    memcpy(bytes, &word, 8);
    put_bits(to, bytes, 0, (ptrdiff_t)length);
    return OK;
}

static void put_end_of_segment(Writer *to, int marker) { /* the last byte is filled with ones, F.1.2.3 */
    uint8_t last = (uint8_t)(to->bits >> 56 | 0xFFu >> to->num_bits);
    put_stuffed(to, &last, to->num_bits != 0);
    to->bits = to->num_bits = 0;
    put_bytes(to, (uint8_t[]){0xFF, (uint8_t)marker}, 2);
}

/* --- Header --- */

static int read_frame(Source *source, const uint8_t *frame, const uint8_t *scan, int scan_length) {
    int height = frame[1] << 8 | frame[2], width = frame[3] << 8 | frame[4], num = frame[5];
    int max_h = 1, max_v = 1;
    if (frame[0] != 8 || !height || !width || scan[0] != num) return LEFT;
    if (num < 1 || num > 4 || scan_length != 4 + 2 * num) return BROKEN_HEADER;
    const uint8_t *spectrum = scan + 1 + 2 * num;
    if (spectrum[0] != 0 || spectrum[1] != 63 || spectrum[2] != 0) return LEFT;
    for (int c = 0; c < num; c++) {
        int h = frame[7 + 3 * c] >> 4, v = frame[7 + 3 * c] & 15;
        if (scan[1 + 2 * c] != frame[6 + 3 * c]) return LEFT;
        if (h < 1 || h > 4 || v < 1 || v > 4) return BROKEN_HEADER;
        if (num == 1) h = v = 1; /* the MCU of a lone component is a block, A.2.2 */
        if (source->num_blocks + h * v > MAX_BLOCKS) return LEFT;
        for (int b = 0; b < h * v; b++) source->component[source->num_blocks++] = (uint8_t)c;
        max_h = h > max_h ? h : max_h;
        max_v = v > max_v ? v : max_v;
        source->dc[c] = scan[2 + 2 * c] >> 4;
        source->ac[c] = scan[2 + 2 * c] & 15;
    }
    source->num_components = num;
    source->num_columns = (width + 8 * max_h - 1) / (8 * max_h);
    source->num_rows = (height + 8 * max_v - 1) / (8 * max_v);
    return OK;
}

static int read_huffman(Context *context, int has_table[2][2], const uint8_t *body, const uint8_t *next) {
    while (next - body > 17) {
        int kind = body[0] >> 4, identifier = body[0] & 15, num_symbols = 0, codes = 0;
        for (int length = 1; length <= 16; length++) {
            num_symbols += body[length];
            codes += body[length] << (16 - length);
        }
        if (num_symbols > 256 || codes > 1 << 16 || next - body < 17 + num_symbols) return BROKEN_HEADER;
        if (kind > 1 || identifier > 1) return LEFT;
        if (build(&context->tables[kind][identifier], body + 1, body + 17, num_symbols, kind)) return LEFT;
        has_table[kind][identifier] = 1;
        body += 17 + num_symbols;
    }
    return body == next ? OK : BROKEN_HEADER;
}

/* Reads the header, and writes all of its segments that stay. */
static int read_header(Source *source, Context *context, const uint8_t *data, size_t size, Writer *to) {
    const uint8_t *at = data + 2, *end = data + size, *frame = NULL;
    int has_table[2][2] = {{0}}, restart_interval = 0, outcome;
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return BROKEN_HEADER;
    put_bytes(to, data, 2);
    for (;;) {
        while (end - at > 1 && at[0] == 0xFF && at[1] == 0xFF) at++;
        if (end - at < 4 || at[0] != 0xFF) return BROKEN_HEADER;
        int marker = at[1], length = (at[2] << 8 | at[3]) - 2;
        const uint8_t *body = at + 4, *next = body + length;
        if (length < 0 || end - body < length) return BROKEN_HEADER;
        if (marker == 0xDA) {
            if (!frame || length < 1) return BROKEN_HEADER;
            if ((outcome = read_frame(source, frame, body, length)) != OK) return outcome;
            for (int c = 0; c < source->num_components; c++)
                if (source->dc[c] > 1 || source->ac[c] > 1 || !has_table[0][source->dc[c]] ||
                    !has_table[1][source->ac[c]])
                    return LEFT;
            int64_t num_mcus = (int64_t)source->num_columns * source->num_rows;
            source->restart_interval = restart_interval ? restart_interval : num_mcus;
            source->scan_header = at;
            source->scan = next;
            source->end = end;
            return OK;
        }
        if (marker == 0xC4) {
            if ((outcome = read_huffman(context, has_table, body, next)) != OK) return outcome;
        } else if (marker == 0xDD) {
            if (length != 2) return BROKEN_HEADER;
            restart_interval = body[0] << 8 | body[1];
        } else if (marker == 0xC0 || marker == 0xC1) {
            if (frame || length < 6 || length != 6 + 3 * body[5]) return BROKEN_HEADER;
            frame = body;
            put_bytes(to, at, (size_t)(next - at));
        } else if (marker == 0xDB || (marker >= 0xE0 && marker <= 0xEF) || marker == 0xFE)
            put_bytes(to, at, (size_t)(next - at));
        else
            return LEFT;
        at = next;
    }
}

/* --- Tables --- */

/* Writes a table's segment. That of DC levels gets codes for the sizes that it lacks, behind its own and so of one
 * length: its codes stay what they are, and that of all ones unused. LEFT where no such length is left. */
static int put_table(Writer *to, int kind, int identifier, const Huffman *table, Codes *codes) {
    uint8_t segment[4 + 17 + 256 + NUM_SIZES] = {0xFF, 0xC4}, *counts = segment + 5, *symbols = segment + 21;
    int num_symbols = 0, longest = 1, has_size[NUM_SIZES] = {0}, num_missing = 0;
    memcpy(counts, table->counts, 16);
    for (int length = 1; length <= 16; length++) {
        num_symbols += counts[length - 1];
        if (counts[length - 1]) longest = length;
    }
    memcpy(symbols, table->symbols, (size_t)num_symbols);
    if (kind == 0) {
        for (int k = 0; k < num_symbols; k++) has_size[symbols[k]] = 1;
        for (int size = 0; size < NUM_SIZES; size++) num_missing += !has_size[size];
    }
    if (num_missing) {
        if (num_symbols + num_missing > UINT8_MAX) return LEFT;
        int spare = (1 << 16) - table->first_beyond[16]; /* codes of 16 bits */
        while (longest <= 16 && (spare >> (16 - longest)) <= num_missing) longest++;
        if (longest > 16) return LEFT;
        counts[longest - 1] += (uint8_t)num_missing;
        for (int size = 0; size < NUM_SIZES; size++)
            if (!has_size[size]) symbols[num_symbols++] = (uint8_t)size;
    }
    segment[2] = (uint8_t)((19 + num_symbols) >> 8);
    segment[3] = (uint8_t)(19 + num_symbols);
    segment[4] = (uint8_t)(kind << 4 | identifier);
    put_bytes(to, segment, 21 + (size_t)num_symbols);
    if (kind == 0)
        for (int length = 1, code = 0, k = 0; length <= 16; length++, code <<= 1)
            for (int i = 0; i < counts[length - 1]; i++, k++, code++) {
                codes->length[symbols[k]] = (uint8_t)length;
                codes->bits[symbols[k]] = (uint16_t)code;
            }
    return OK;
}

static int put_tables(Writer *to, const Source *source, const Context *context, Codes *codes) {
    int has_table[2][2] = {{0}};
    for (int c = 0; c < source->num_components; c++)
        for (int kind = 0; kind < 2; kind++) {
            int identifier = kind ? source->ac[c] : source->dc[c];
            if (has_table[kind][identifier]++) continue;
            const Huffman *table = &context->tables[kind][identifier];
            if (put_table(to, kind, identifier, table, &codes[identifier]) != OK) return LEFT;
        }
    return OK;
}

/* --- Scan --- */

/* The bits of the next DC symbol, its value's among them. */
static int dc_length(Reader reader, const Huffman *dc) {
    refill(&reader);
    return next_step(&reader, dc, 0) & 63;
}

/* Writes the scan, a segment for each row of MCUs. Segments of the source begin wherever they like: where one does, and
 * where a row does, DC levels are written again. `bytes` has room for the scan and SCAN_PADDING. */
static int put_scan(Writer *to, const Source *source, const Block *blocks, const Codes *codes, uint8_t *bytes) {
    int level[4] = {0}, level_before[4] = {0}, marker = 0, outcome;
    int64_t left = 0, num_mcus = (int64_t)source->num_columns * source->num_rows, num_passed;
    const uint8_t *at = source->scan;
    uint8_t *end = bytes; /* of the segment */
    Reader reader = {0};
    for (int64_t mcu = 0, segment = 0, row = 0, column = 0; mcu < num_mcus; mcu += num_passed) {
        if (left == 0) {
            end = bytes;
            at = copy_segment(at, source->end, &end, &marker);
            while (at && marker == 0xFF) { /* a fill byte, B.1.1.2 */
                marker = at < source->end ? *at : 0xD9;
                at = at < source->end ? at + 1 : NULL;
            }
            if (!at) return CUT_SHORT;
            if (!marker) return LEFT; /* 0xFF, 0xFF, 0: libjpeg-turbo goes on, and gets wrong coefficients */
            memset(end, 0, SCAN_PADDING);
            reader = (Reader){0, 0, bytes};
            memcpy(level_before, level, sizeof level);
            memset(level, 0, sizeof level);
            left = num_mcus - mcu < source->restart_interval ? num_mcus - mcu : source->restart_interval;
        }
        if (column == 0) memset(level_before, 0, sizeof level_before);
        num_passed = left < source->num_columns - column ? left : source->num_columns - column;
        ptrdiff_t copied = bits_read(&reader, bytes);
        for (const Block *block = blocks; block < blocks + source->num_blocks; block++) {
            int c = block->component, length = block->is_first ? dc_length(reader, block->tables[0]) : 0;
            ptrdiff_t start = bits_read(&reader, bytes);
            outcome = pass_blocks(&reader, block, 1, level, end + 8);
            if (outcome != DONE) return outcome == BEYOND_LIMIT ? CUT_SHORT : NO_SUCH_CODE;
            if (!block->is_first) continue;
            put_bits(to, bytes, copied, start);
            copied = start + length;
            if (put_difference(to, &codes[source->dc[c]], level[c] - level_before[c]) != OK) return TOO_LARGE;
        }
        outcome = pass_blocks(&reader, blocks, (num_passed - 1) * source->num_blocks, level, end + 8);
        if (outcome != DONE) return outcome == BEYOND_LIMIT ? CUT_SHORT : NO_SUCH_CODE;
        ptrdiff_t num_bits = bits_read(&reader, bytes), spare = end - bytes - (num_bits + 7) / 8;
        put_bits(to, bytes, copied, num_bits);
        column += num_passed;
        if (column == source->num_columns) {
            put_end_of_segment(to, row == source->num_rows - 1 ? 0xD9 : 0xD0 | (row & 7));
            row++;
            column = 0;
        }
        left -= num_passed;
        if (left) continue;
        int is_restart = (marker & 0xF8) == 0xD0, is_last = mcu + num_passed == num_mcus;
        if (spare < 0) return CUT_SHORT;
        if (spare > STRAY_BYTES) return WRONG_MARKER;
        if (spare || (is_last && marker != 0xD9 && marker >= 0xC0 && !is_restart)) return LEFT;
        if (marker != (is_last ? 0xD9 : (int)(0xD0 | (segment & 7)))) return WRONG_MARKER;
        segment++;
    }
    return OK;
}

/* --- Entry points --- */

/* Scratch memory for a file of `num_bytes`. */
size_t add_restarts_scratch_bytes(size_t num_bytes) { return num_bytes + SCAN_PADDING + ALIGNMENT; }

/* Room for the result of a file of `num_bytes`: all bytes stuffed, and what rows and tables add at most. */
size_t add_restarts_room_bytes(size_t num_bytes) { return 2 * num_bytes + MAX_ROWS * 40 + 4 * 300; }

/* Writes the file with restart markers into `room`. Returns its bytes, LEFT for a file that is to be left as it is, or
 * the fault of a damaged one. */
int64_t add_restarts(Context *context, uint8_t *scratch, size_t scratch_bytes, const uint8_t *data, size_t size,
                     uint8_t *room, size_t room_bytes) {
    Writer to = {room, room + room_bytes, 0, 0, 0};
    Source source = {0};
    Codes codes[2] = {0};
    int outcome = read_header(&source, context, data, size, &to);
    if (outcome != OK) return outcome;
    if (put_tables(&to, &source, context, codes) != OK) return LEFT;
    Scratch memory = {scratch, scratch + scratch_bytes};
    uint8_t *bytes = take(&memory, (size_t)(source.end - source.scan) + SCAN_PADDING);
    if (!bytes) return LEFT;
    uint8_t interval[] = {0xFF, 0xDD, 0, 4, (uint8_t)(source.num_columns >> 8), (uint8_t)source.num_columns};
    put_bytes(&to, interval, sizeof interval);
    put_bytes(&to, source.scan_header, (size_t)(source.scan - source.scan_header));
    Block blocks[MAX_BLOCKS];
    for (int b = 0; b < source.num_blocks; b++) {
        int c = source.component[b];
        const Huffman *dc = &context->tables[0][source.dc[c]], *ac = &context->tables[1][source.ac[c]];
        Steps *steps = &context->steps[source.dc[c]][source.ac[c]];
        int is_first = b == 0 || c != source.component[b - 1];
        blocks[b] = (Block){.tables = {dc, ac},
                            .steps = {steps->steps[0], steps->steps[1]},
                            .next = &blocks[(b + 1) % source.num_blocks],
                            .component = c,
                            .is_first = is_first};
        if (is_first) make_steps(steps, blocks[b].tables);
    }
    outcome = put_scan(&to, &source, blocks, codes, bytes);
    if (outcome != OK) return outcome;
    return to.is_full ? LEFT : to.at - room;
}

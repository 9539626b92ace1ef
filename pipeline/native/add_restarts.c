/* Writes a baseline JPEG again with a restart marker after each row of MCUs, and Huffman tables made for what it holds.
 *
 * Coefficients stay as they are, so pixels do too, and so do all other segments of the header. Symbols are read and
 * counted, tables are made of the counts, then the symbols are written. What comes after the image's end is dropped.
 *
 * LEFT is the answer for what is not baseline with all components in one scan, and for a scan with stray bytes that a
 * decoder may pass over; a damaged file is named by its fault. References: ITU-T T.81, annexes B, E, F and K.
 */

#include "memory.h"

enum { MAX_BLOCKS = 10, MAX_ROWS = 65535 / 8 + 1, STRAY_BYTES = 7 }; /* blocks of an MCU; rows of MCUs */
enum { CHUNK_TOKENS = 1024, MCU_TOKENS = MAX_BLOCKS * 66, MCU_PADDING = MAX_BLOCKS * 64 * 4 + 64 };
enum { LEFT = 0, BROKEN_HEADER = -1, CUT_SHORT = -2, NO_SUCH_CODE = -3, TOO_LARGE = -4, WRONG_MARKER = -5 };
enum { OK = 1 };

/* A symbol to write. From the lowest bit: its value's bits (16), the symbol (8), its table (2: AC, identifier). */
typedef uint32_t Token;
enum { ZERO_RUN = 0xF0 };

typedef struct {
    int num_columns, num_rows; /* of MCUs */
    int num_blocks, num_components;
    uint8_t component[MAX_BLOCKS]; /* of each block of an MCU */
    uint8_t dc[4], ac[4];          /* identifiers of Huffman tables, by component */
    int64_t restart_interval;      /* MCUs of a segment */
    const uint8_t *scan_header, *scan, *end;
} Source;

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

/* Writes symbols without a branch for each; `codes` has by table and symbol the code before room for the value (27 bits)
 * and, in the lowest 5 bits, the length of both. */
static void put_tokens(Writer *to, const Token *token, const Token *end, const uint32_t *codes) {
    uint8_t chunk[4 * CHUNK_TOKENS + 8];
    while (token < end) {
        const Token *stop = end - token > CHUNK_TOKENS ? token + CHUNK_TOKENS : end;
        uint8_t *at = chunk;
        uint64_t bits = to->bits;
        unsigned num_bits = to->num_bits;
        for (; token < stop; token++) {
            uint32_t code = codes[*token >> 16];
            unsigned length = code & 31;
            bits |= (uint64_t)(code >> 5 | (*token & 0xFFFF)) << (64 - num_bits - length);
            uint64_t word = __builtin_bswap64(bits);
            memcpy(at, &word, 8);
            num_bits += length;
            at += num_bits >> 3;
            bits <<= num_bits & ~7u;
            num_bits &= 7;
        }
        put_stuffed(to, chunk, (size_t)(at - chunk));
        to->bits = bits;
        to->num_bits = num_bits;
    }
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

/* --- Symbols --- */

/* What the next LOOK bits begin with. From the lowest bit: bits of code and value (8), of the code (8), the symbol (8),
 * how far it advances in the block (8). 0 for codes longer than LOOK. */
typedef uint32_t Step;

INLINE Step make_step(int symbol, int length) {
    unsigned advance = symbol ? (unsigned)(symbol >> 4) + 1 : END_OF_BLOCK;
    return advance << 24 | (Step)symbol << 16 | (Step)length << 8 | (Step)(length + (symbol & 15));
}

static void make_steps(const Huffman *table, Step *steps) {
    memset(steps, 0, sizeof(Step) << LOOK);
    for (int length = 1, k = 0; length <= LOOK; length++)
        for (int i = 0; i < table->counts[length - 1]; i++, k++) {
            int spare = LOOK - length, code = k - table->offset[length];
            for (int rest = 0; rest < 1 << spare; rest++)
                steps[code << spare | rest] = make_step(table->symbols[k], length);
        }
}

typedef struct {
    Token *at, *end;
    uint32_t counts[4][256]; /* of each symbol, by table */
    Step steps[4][1 << LOOK];
} Symbols;

typedef struct { /* of an MCU */
    const Huffman *dc, *ac;
    const Step *dc_steps, *ac_steps;
    uint32_t *dc_counts, *ac_counts;
    Token dc_table, ac_table;
    int *level, *sent; /* DC: read, and written last */
} Block;

INLINE Step next_step(const Reader *reader, const Step *steps, const Huffman *table) {
    Step step = steps[reader->bits >> (64 - LOOK)];
    if (UNLIKELY(!step)) {
        int length = LOOK + 1, symbol = find_symbol(table, reader->bits, &length);
        if (symbol >= 0) step = make_step(symbol, length);
    }
    return step;
}

INLINE uint32_t take_value(Reader *reader, Step step) {
    uint32_t value = (uint32_t)(reader->bits << (step >> 8 & 31) >> 1 >> (63 - (step >> 16 & 15)));
    reader->bits <<= step & 63;
    reader->num_bits -= step;
    return value;
}

/* Reads a symbol of a block whose last coefficient so far is `k`; returns the new one, BROKEN where a code is none. */
INLINE unsigned move_symbol(Reader *reader, const Block *block, Token **to, unsigned k) {
    Step step = next_step(reader, block->ac_steps, block->ac);
    if (UNLIKELY(!step)) return BROKEN;
    unsigned symbol = step >> 16 & 255;
    block->ac_counts[symbol]++;
    *(*to)++ = block->ac_table | symbol << 16 | take_value(reader, step);
    return k + (step >> 24);
}

INLINE int move_block(Reader *from, const Block *block, Token **tokens) {
    Reader reader = *from;
    Token *to = *tokens;
    refill(&reader);
    Step step = next_step(&reader, block->dc_steps, block->dc);
    if (UNLIKELY(!step)) return NO_SUCH_CODE;
    unsigned value = take_value(&reader, step), size = step >> 16 & 15;
    *block->level += (int)(value - (((1u << size) - 1) & ((value << 1 >> size) - 1))); /* F.2.2.1, without a branch */
    int difference = *block->level - *block->sent, sign = difference >> 31;
    unsigned magnitude = (unsigned)((difference ^ sign) - sign);
    if (UNLIKELY(magnitude > 2047)) return TOO_LARGE;
    size = 31 - (unsigned)__builtin_clz(magnitude << 1 | 1);
    block->dc_counts[size]++;
    *to++ = block->dc_table | size << 16 | ((unsigned)(difference + sign) & ((1u << size) - 1));
    *block->sent = *block->level;
    const Token *first = to;
    unsigned k = 0;
    for (;;) {
        k = move_symbol(&reader, block, &to, k);
        if (k >= 63) break;
        refill(&reader);
        k = move_symbol(&reader, block, &to, k);
        if (k >= 63) break;
    }
    *from = reader;
    if (k != 63 && k - END_OF_BLOCK > 62) return NO_SUCH_CODE;
    Token zero_run = block->ac_table | ZERO_RUN << 16, block_end = block->ac_table;
    if (UNLIKELY(to[-1] == zero_run || (to - first > 1 && to[-2] == zero_run && to[-1] == block_end))) {
        to -= to[-1] == block_end; /* zeros up to the end need no runs */
        for (; to > first && to[-1] == zero_run; to--) block->ac_counts[ZERO_RUN]--;
        block->ac_counts[0] += k == 63;
        *to++ = block_end;
    }
    *tokens = to;
    return OK;
}

/* Reads the scan's symbols; `row_ends` gets where each row of MCUs ends. */
static int read_scan(const Source *source, const Context *context, uint8_t *bytes, Symbols *symbols,
                     Token **row_ends) {
    int level[4] = {0}, sent[4] = {0}, marker = 0;
    Block blocks[MAX_BLOCKS];
    for (int b = 0; b < source->num_blocks; b++) {
        int c = source->component[b], dc = source->dc[c], ac = 2 | source->ac[c];
        blocks[b] = (Block){.dc = &context->tables[0][dc],
                            .ac = &context->tables[1][ac & 1],
                            .dc_steps = symbols->steps[dc],
                            .ac_steps = symbols->steps[ac],
                            .dc_counts = symbols->counts[dc],
                            .ac_counts = symbols->counts[ac],
                            .dc_table = (Token)dc << 24,
                            .ac_table = (Token)ac << 24,
                            .level = &level[c],
                            .sent = &sent[c]};
    }
    for (int c = 0; c < source->num_components; c++) {
        make_steps(&context->tables[0][source->dc[c]], symbols->steps[source->dc[c]]);
        make_steps(&context->tables[1][source->ac[c]], symbols->steps[2 | source->ac[c]]);
    }
    int64_t left = 0, num_mcus = (int64_t)source->num_columns * source->num_rows;
    const uint8_t *at = source->scan, *segment_end = bytes;
    Reader reader = {0};
    for (int64_t mcu = 0, segment = 0; mcu < num_mcus; mcu++) {
        if (left == 0) {
            uint8_t *to = bytes;
            at = copy_segment(at, source->end, &to, &marker);
            while (at && marker == 0xFF) { /* a fill byte, B.1.1.2 */
                marker = at < source->end ? *at : 0xD9;
                at = at < source->end ? at + 1 : NULL;
            }
            if (!at) return CUT_SHORT;
            if (!marker) return LEFT; /* 0xFF, 0xFF, 0: libjpeg-turbo goes on, and gets wrong coefficients */
            memset(to, 0, MCU_PADDING);
            segment_end = to;
            reader = (Reader){0, 0, bytes};
            memset(level, 0, sizeof level);
            left = num_mcus - mcu < source->restart_interval ? num_mcus - mcu : source->restart_interval;
        }
        if (mcu % source->num_columns == 0) memset(sent, 0, sizeof sent);
        if (reader.at > segment_end + 8) return CUT_SHORT; /* so that an MCU never reads beyond the padding */
        if (symbols->end - symbols->at < MCU_TOKENS) return LEFT;
        for (int b = 0; b < source->num_blocks; b++) {
            int outcome = move_block(&reader, &blocks[b], &symbols->at);
            if (UNLIKELY(outcome != OK)) return reader.at > segment_end + 8 ? CUT_SHORT : outcome;
        }
        if ((mcu + 1) % source->num_columns == 0) row_ends[mcu / source->num_columns] = symbols->at;
        if (--left) continue;
        ptrdiff_t num_bits = (reader.at - bytes) * 8 - (ptrdiff_t)(reader.num_bits & 63);
        ptrdiff_t spare = segment_end - bytes - (num_bits + 7) / 8;
        int is_restart = (marker & 0xF8) == 0xD0, is_last = mcu == num_mcus - 1;
        if (spare < 0) return CUT_SHORT;
        if (spare > STRAY_BYTES) return WRONG_MARKER;
        if (spare || (is_last && marker != 0xD9 && marker >= 0xC0 && !is_restart)) return LEFT;
        if (marker != (is_last ? 0xD9 : (int)(0xD0 | (segment & 7)))) return WRONG_MARKER;
        segment++;
    }
    return OK;
}

/* --- Tables --- */

/* Makes the Huffman table of some counts, annex K.2, and writes its segment; `codes` gets what `put_tokens` takes. Keys are a count and 256 less the symbol, so that the least is K.2's choice. */
static void put_table(Writer *to, int identifier, const uint32_t *counts, uint32_t *codes) {
    uint64_t keys[257];
    int num_keys = 0, length_of[257] = {0}, next[257], num_of[258] = {0}, place[258] = {0};
    for (int symbol = 0; symbol <= 256; symbol++) { /* 256 takes the code of all ones, which stays unused */
        next[symbol] = -1;
        uint64_t number = symbol == 256 ? 1 : counts[symbol];
        if (number) keys[num_keys++] = number << 9 | (uint64_t)(256 - symbol);
    }
    while (num_keys > 1) {
        int least = keys[1] < keys[0], second = !least;
        for (int i = 2; i < num_keys; i++) {
            if (keys[i] < keys[least]) {
                second = least;
                least = i;
            } else if (keys[i] < keys[second])
                second = i;
        }
        int one = 256 - (int)(keys[least] & 511), other = 256 - (int)(keys[second] & 511);
        keys[least] += keys[second] >> 9 << 9;
        keys[second] = keys[--num_keys];
        for (length_of[one]++; next[one] >= 0; length_of[one]++) one = next[one];
        next[one] = other;
        for (; other >= 0; other = next[other]) length_of[other]++;
    }
    for (int symbol = 0; symbol <= 256; symbol++) num_of[length_of[symbol]]++;
    for (int length = 1; length < 257; length++) place[length + 1] = place[length] + num_of[length];
    uint8_t segment[4 + 17 + 256] = {0xFF, 0xC4}, *symbols = segment + 21;
    int num_symbols = place[257] - 1;
    for (int symbol = 0; symbol < 256; symbol++)
        if (length_of[symbol]) symbols[place[length_of[symbol]]++] = (uint8_t)symbol;
    for (int length = 256; length > 16; length--) /* figure K.3: none is longer than 16 bits */
        while (num_of[length]) {
            int shorter = length - 2;
            while (!num_of[shorter]) shorter--;
            num_of[length] -= 2;
            num_of[length - 1]++;
            num_of[shorter + 1] += 2;
            num_of[shorter]--;
        }
    int longest = 16;
    while (!num_of[longest]) longest--;
    num_of[longest]--; /* that of 256 */
    segment[2] = (uint8_t)((19 + num_symbols) >> 8);
    segment[3] = (uint8_t)(19 + num_symbols);
    segment[4] = (uint8_t)identifier;
    uint32_t code = 0;
    for (int length = 1, k = 0; length <= 16; length++, code <<= 1) {
        segment[4 + length] = (uint8_t)num_of[length];
        for (int i = 0; i < num_of[length]; i++, code++) {
            int size = symbols[k] & 15;
            codes[symbols[k++]] = code << size << 5 | (uint32_t)(length + size);
        }
    }
    put_bytes(to, segment, 21 + (size_t)num_symbols);
}

/* --- Entry points --- */

/* Scratch memory for a file of `num_bytes`: each symbol takes a bit of it, or more. */
size_t add_restarts_scratch_bytes(size_t num_bytes) {
    return num_bytes + MCU_PADDING + (8 * num_bytes + 2 * MCU_TOKENS) * sizeof(Token) + MAX_ROWS * sizeof(Token *) +
           4 * ALIGNMENT;
}

/* Room for the result of a file of `num_bytes`: all bytes stuffed, and what rows and tables add at most. */
size_t add_restarts_room_bytes(size_t num_bytes) { return 2 * num_bytes + MAX_ROWS * 40 + 4 * 300; }

/* Writes the file with restart markers into `room`. Returns its bytes, LEFT for a file that is to be left as it is, or
 * the fault of a damaged one. */
int64_t add_restarts(Context *context, uint8_t *scratch, size_t scratch_bytes, const uint8_t *data, size_t size,
                     uint8_t *room, size_t room_bytes) {
    Writer to = {room, room + room_bytes, 0, 0, 0};
    Source source = {0};
    int outcome = read_header(&source, context, data, size, &to);
    if (outcome != OK) return outcome;
    Scratch memory = {scratch, scratch + scratch_bytes};
    uint8_t *bytes = take(&memory, (size_t)(source.end - source.scan) + MCU_PADDING);
    Token **row_ends = take(&memory, (size_t)source.num_rows * sizeof(Token *));
    size_t num_tokens = 8 * size + 2 * MCU_TOKENS;
    Symbols symbols = {.at = take(&memory, num_tokens * sizeof(Token))};
    if (!bytes || !row_ends || !symbols.at) return LEFT;
    const Token *first = symbols.at;
    symbols.end = symbols.at + num_tokens;
    outcome = read_scan(&source, context, bytes, &symbols, row_ends);
    if (outcome != OK) return outcome;
    uint32_t codes[4 * 256] = {0};
    int has_table[4] = {0};
    for (int c = 0; c < source.num_components; c++)
        for (int kind = 0; kind < 2; kind++) {
            int identifier = kind ? source.ac[c] : source.dc[c], table = kind << 1 | identifier;
            if (has_table[table]++) continue;
            put_table(&to, kind << 4 | identifier, symbols.counts[table], codes + 256 * table);
        }
    uint8_t interval[] = {0xFF, 0xDD, 0, 4, (uint8_t)(source.num_columns >> 8), (uint8_t)source.num_columns};
    put_bytes(&to, interval, sizeof interval);
    put_bytes(&to, source.scan_header, (size_t)(source.scan - source.scan_header));
    for (int row = 0; row < source.num_rows; row++) {
        put_tokens(&to, row ? row_ends[row - 1] : first, row_ends[row], codes);
        put_end_of_segment(&to, row == source.num_rows - 1 ? 0xD9 : 0xD0 | (row & 7));
    }
    return to.is_full ? LEFT : to.at - room;
}

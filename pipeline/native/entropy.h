/* Baseline Huffman decoding, several symbols with one look at a table; ITU-T T.81, annexes B, F and K. */

#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

enum {
    LOOK = 11,                   /* bits looked at in one go */
    BLOCK = 80,                  /* coefficients of a block, and room for what stands beyond the last */
    MCU_MAX_BYTES = 6 * 64 * 4,  /* six blocks of 64 symbols of at most 27 bits */
    PADDING = MCU_MAX_BYTES + 64 /* bytes that must be readable after the entropy-coded ones */
};
enum { DONE = 0, NOT_MINE = 1, BEYOND_LIMIT = 2 };

/* What the next LOOK bits begin with, up to two symbols. From the lowest bit: bits used (6), PARTIAL (bit 7), how far
 * the first and the second symbol advance in the block (8 each), a gap (8), their values (16 each). A lone symbol's
 * second advance is 0 and its second value its own. PARTIAL: the table does not hold all of the first symbol; the
 * "advance" is then the symbol, and the bits are its code's length, 0 for codes longer than LOOK. */
typedef uint64_t Entry;
enum { PARTIAL = 128, END_OF_BLOCK = 128 };

#define ENTRY(value1, advance1, value2, advance2, bits)                                                             \
    ((Entry)(uint16_t)(value2) << 48 | (Entry)(uint16_t)(value1) << 32 | (Entry)(advance2) << 16 |                  \
     (Entry)(advance1) << 8 | (Entry)(bits))
#define BITS(entry) ((int)((entry) & 63))
#define ADVANCE1(entry) ((unsigned)((entry) >> 8 & 255))
#define ADVANCE2(entry) ((unsigned)((entry) >> 16 & 255))
#define VALUE1(entry) ((int16_t)((entry) >> 32))
#define VALUE2(entry) ((int16_t)((entry) >> 48))

typedef struct {
    Entry look[1 << LOOK];
    uint8_t counts[16], symbols[256]; /* as in the file */
    int32_t first_beyond[17];         /* by length: the first code that is longer, left-aligned in 16 bits */
    int32_t offset[17];               /* by length: index in `symbols` less code */
    int is_built;
} Huffman;

static const uint8_t NATURAL_ORDER[256] = { /* of zigzag order; what goes beyond the block lands behind it */
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    [64 ... 255] = 64};

INLINE int extended(int bits, int size) { /* T.81 F.2.2.1 */
    return size == 0 ? 0 : bits < 1 << (size - 1) ? bits - (1 << size) + 1 : bits;
}

/* A symbol with its value, as an entry of one. The block's end is an advance that no run has. */
INLINE Entry single(int symbol, int length, int bits) {
    int run = symbol >> 4, size = symbol & 15, value = extended(bits, size);
    return ENTRY(value, size || run == 15 ? run + 1 : END_OF_BLOCK, value, 0, length + size);
}

static int build(Huffman *table, const uint8_t *counts, const uint8_t *symbols, int num_symbols, int is_ac) {
    if (table->is_built && !memcmp(table->counts, counts, 16) && !memcmp(table->symbols, symbols, num_symbols))
        return DONE;
    table->is_built = 0;
    memcpy(table->counts, counts, 16);
    memcpy(table->symbols, symbols, num_symbols);
    for (int i = 0; i < 1 << LOOK; i++) table->look[i] = PARTIAL;
    for (int length = 1, code = 0, k = 0; length <= 16; length++, code <<= 1) {
        table->offset[length] = k - code;
        for (int i = 0; i < counts[length - 1]; i++, k++, code++) {
            int symbol = symbols[k], size = symbol & 15, spare = LOOK - length;
            int is_known = is_ac ? size ? size <= 10 : symbol == 0x00 || symbol == 0xF0 : symbol <= 11;
            if (!is_known || code >= (1 << length) - 1) return NOT_MINE; /* all ones is no code */
            for (int rest = 0; spare >= 0 && rest < 1 << spare; rest++)
                table->look[code << spare | rest] = size <= spare ? single(symbol, length, rest >> (spare - size))
                                                                  : ENTRY(0, symbol, 0, 0, PARTIAL | length);
        }
        table->first_beyond[length] = code << (16 - length);
    }
    Entry alone[1 << LOOK];
    memcpy(alone, table->look, sizeof alone);
    for (int i = 0; is_ac && i < 1 << LOOK; i++) {
        Entry first = alone[i], second = alone[i << BITS(first) & ((1 << LOOK) - 1)];
        int bits = BITS(first) + BITS(second);
        if (!((first | second) & PARTIAL) && ADVANCE1(first) != END_OF_BLOCK && bits <= LOOK)
            table->look[i] = ENTRY(VALUE1(first), ADVANCE1(first), VALUE1(second), ADVANCE1(second), bits);
    }
    table->is_built = 1;
    return DONE;
}

/* The next bits, first one highest. Of `num_bits` only the low six count: it is never masked, shifts do that. */
typedef struct {
    uint64_t bits, num_bits;
    const uint8_t *at;
} Reader;

INLINE void refill(Reader *reader) { /* to 56 bits and more, which are two symbols */
    uint64_t next;
    memcpy(&next, reader->at, 8);
    reader->bits |= __builtin_bswap64(next) >> (reader->num_bits & 63);
    reader->at += (63 - reader->num_bits) >> 3 & 7;
    reader->num_bits |= 56;
}

INLINE void consume(Reader *reader, Entry entry) {
    reader->bits <<= BITS(entry);
    reader->num_bits -= entry;
}

/* The next symbol, with a code of `*length` bits or more, which becomes its length; -1 where there is no such code. */
INLINE int find_symbol(const Huffman *table, uint64_t bits, int *length) {
    int32_t code = (int32_t)(bits >> 48);
    while (code >= table->first_beyond[*length])
        if (++*length > 16) return -1;
    return table->symbols[((code >> (16 - *length)) + table->offset[*length]) & 255];
}

/* The next symbol by its code, from a length on; 0 where there is no such code. */
static __attribute__((noinline, unused)) Entry by_code(const Huffman *table, uint64_t bits, int length) {
    int symbol = find_symbol(table, bits, &length), size = symbol & 15;
    return symbol < 0 ? 0 : single(symbol, length, size ? (int)(bits << length >> (64 - size)) : 0);
}

/* Reads one or two symbols of a block whose last coefficient so far is `k`; returns the new one. BROKEN where a code is
 * none. One by one is for the rare blocks that end without a symbol that says so: there the second of two symbols would
 * be the next block's. */
enum { BROKEN = 255 };
INLINE unsigned read_symbols(Reader *reader, const Huffman *ac, const int16_t *quant, int16_t *block, unsigned k,
                             int one_by_one) {
    Entry entry = one_by_one ? PARTIAL | 1 : ac->look[reader->bits >> (64 - LOOK)];
    if (UNLIKELY(entry & PARTIAL)) {
        entry = by_code(ac, reader->bits, BITS(entry) ? BITS(entry) : LOOK + 1);
        if (!entry) return BROKEN;
    }
    consume(reader, entry);
    k += ADVANCE1(entry);
    block[NATURAL_ORDER[k]] = (int16_t)(VALUE1(entry) * quant[k & 63]);
    k += ADVANCE2(entry);
    block[NATURAL_ORDER[k]] = (int16_t)(VALUE2(entry) * quant[k & 63]);
    return k;
}

/* Reads a block and writes its coefficients times their quantisers into the zeroed `block`. Returns the index of the
 * last one, BROKEN where the data are. */
INLINE unsigned read_block(Reader *from, const Huffman *dc, const Huffman *ac, const int16_t *quant, int *level,
                           int16_t *block, int one_by_one) {
    Reader reader = *from;
    refill(&reader);
    Entry entry = dc->look[reader.bits >> (64 - LOOK)];
    if (UNLIKELY(entry & PARTIAL)) {
        entry = by_code(dc, reader.bits, BITS(entry) ? BITS(entry) : LOOK + 1);
        if (!entry) return BROKEN;
    }
    consume(&reader, entry);
    int dc_level = *level + VALUE1(entry);
    block[0] = (int16_t)(dc_level * quant[0]);
    unsigned k = 0;
    for (;;) {
        k = read_symbols(&reader, ac, quant, block, k, one_by_one);
        if (k >= 63) break;
        refill(&reader);
        k = read_symbols(&reader, ac, quant, block, k, one_by_one);
        if (k >= 63) break;
    }
    /* The 63rd coefficient is the end already: an end-of-block after it is the next block's code, misread. */
    unsigned last = k == 63 ? k : k - END_OF_BLOCK;
    if (last > 62 && k != 63) return BROKEN;
    *from = reader;
    *level = dc_level;
    return last;
}

static __attribute__((noinline, unused)) unsigned read_block_one_by_one(Reader *from, const Huffman *dc,
                                                                        const Huffman *ac, const int16_t *quant,
                                                                        int *level, int16_t *block) {
    return read_block(from, dc, ac, quant, level, block, 1);
}

/* --- To pass over blocks --- */

/* What the next PEEK bits begin with: as many symbols as they hold. From the lowest bit: their bits (6), BLOCK_END, how
 * far they advance in the block (8), how the DC level differs (16). 0 where they do not hold one. */
typedef uint32_t Step;
enum { PEEK = 12, BLOCK_END = 128, LOOKS = 56 / PEEK }; /* looks after a refill, which is 56 bits */

typedef struct { /* of a component's tables: for a DC symbol with what follows, and for what follows alone */
    Step steps[2][1 << PEEK];
    uint8_t counts[2][16], symbols[2][256]; /* of the tables */
    int is_made;
} Steps;

typedef struct Block { /* of an MCU */
    const Huffman *tables[2];
    const Step *steps[2];
    const struct Block *next; /* of the last one: the first */
    int component, is_first;  /* of its component */
} Block;

INLINE Step make_step(int kind, int symbol, int length, int value) {
    int size = symbol & 15, is_end = kind == 1 && symbol == 0, advance = kind == 0 || is_end ? 0 : (symbol >> 4) + 1;
    uint32_t difference = kind == 0 ? (uint32_t)extended(value, size) : 0;
    return difference << 16 | (uint32_t)advance << 8 | (is_end ? BLOCK_END : 0) | (uint32_t)(length + size);
}

/* The next symbol, of a table of DC levels (kind 0) or of the others; 0 where it has no such code. */
static Step next_step(const Reader *reader, const Huffman *table, int kind) {
    int length = 1, symbol = find_symbol(table, reader->bits, &length), size = symbol & 15;
    if (symbol < 0) return 0;
    return make_step(kind, symbol, length, size ? (int)(reader->bits << length >> (64 - size)) : 0);
}

static __attribute__((unused)) void make_steps(Steps *steps, const Huffman *const *tables) {
    int is_made = steps->is_made;
    for (int kind = 0; kind < 2; kind++)
        is_made = is_made && !memcmp(steps->counts[kind], tables[kind]->counts, 16) &&
                  !memcmp(steps->symbols[kind], tables[kind]->symbols, 256);
    if (is_made) return;
    memset(steps, 0, sizeof *steps);
    for (int kind = 0; kind < 2; kind++) {
        const Huffman *table = tables[kind];
        memcpy(steps->counts[kind], table->counts, 16);
        memcpy(steps->symbols[kind], table->symbols, 256);
        for (int length = 1, k = 0; length <= PEEK; length++)
            for (int i = 0; i < table->counts[length - 1]; i++, k++) {
                int symbol = table->symbols[k], size = symbol & 15, spare = PEEK - length;
                int code = k - table->offset[length];
                if (size <= spare)
                    for (int rest = 0; rest < 1 << spare; rest++)
                        steps->steps[kind][code << spare | rest] =
                            make_step(kind, symbol, length, rest >> (spare - size));
            }
    }
    Step alone[1 << PEEK];
    memcpy(alone, steps->steps[1], sizeof alone);
    for (int kind = 0; kind < 2; kind++)
        for (int i = 0; i < 1 << PEEK; i++) {
            Step step = steps->steps[kind][i];
            while (step && !(step & BLOCK_END)) {
                Step next = alone[(unsigned)i << (step & 63) & ((1 << PEEK) - 1)];
                if (!next || (step & 63) + (next & 63) > PEEK) break;
                step += next;
            }
            steps->steps[kind][i] = step;
        }
    steps->is_made = 1;
}

/* Passes over blocks, the first one of its MCU at `block`, and adds to the DC levels of their components. There is no
 * branch for where a block ends: it would be mispredicted at each. Behind `limit` 32 bytes more can be read. */
static __attribute__((unused)) int pass_blocks(Reader *from, const Block *block, int64_t num_blocks, int *level,
                                               const uint8_t *limit) {
    Reader reader = *from;
    const Step *steps = block->steps[0];
    unsigned k = 0, kind = 0;
    while (num_blocks) {
        if (UNLIKELY(reader.at > limit)) return BEYOND_LIMIT;
        refill(&reader);
        for (int look = 0; look < LOOKS && num_blocks; look++) {
            Step step = steps[reader.bits >> (64 - PEEK)];
            unsigned next_k = k + (step >> 8 & 255);
            if (UNLIKELY(!step | (next_k > 62))) {
                refill(&reader);
                step = next_step(&reader, block->tables[kind], (int)kind);
                next_k = k + (step >> 8 & 255);
                if (!step || next_k > 63) return reader.at > limit ? BEYOND_LIMIT : NOT_MINE;
                if (next_k == 63) step |= BLOCK_END; /* without a symbol that says so */
                look = LOOKS;
            }
            reader.bits <<= step & 63;
            reader.num_bits -= step;
            level[block->component] += (int32_t)step >> 16;
            unsigned is_end = step & BLOCK_END;
            const Step *rest = block->steps[1];
            const Block *next = block->next;
            const Step *start = next->steps[0];
            k = is_end ? 0 : next_k;
            kind = !is_end;
            steps = is_end ? start : rest;
            block = is_end ? next : block;
            num_blocks -= is_end != 0;
        }
    }
    *from = reader;
    return DONE;
}

INLINE ptrdiff_t bits_read(const Reader *reader, const uint8_t *bytes) {
    return (reader->at - bytes) * 8 - (ptrdiff_t)(reader->num_bits & 63);
}

/* --- Segments --- */

/* Copies the entropy-coded bytes up to the next marker without the zeros stuffed after 0xFF, where `*to` is not null.
 * Returns what follows the marker, null where there is none. */
static const uint8_t *copy_segment(const uint8_t *at, const uint8_t *end, uint8_t **to, int *marker) {
    for (;;) {
        const uint8_t *found = memchr(at, 0xFF, (size_t)(end - at));
        if (!found || end - found < 2) return NULL;
        if (*to) {
            memcpy(*to, at, (size_t)(found - at));
            *to += found - at;
        }
        at = found + 2;
        *marker = found[1];
        if (*marker) return at;
        if (*to) *(*to)++ = 0xFF;
    }
}

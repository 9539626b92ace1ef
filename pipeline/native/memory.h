/* What callers lend for a call: a context a thread, which lasts, and scratch memory. Nothing is allocated here. */

#pragma once
#include <stddef.h>
#include <stdint.h>
#include "entropy.h"

enum { ALIGNMENT = 64 };

/* What the next PEEK bits begin with: as many symbols as they hold. From the lowest bit: their bits (6), BLOCK_END, how
 * far they advance in the block (8), how the DC level differs (16). 0 where they do not hold one. */
typedef uint32_t Step;
enum { PEEK = 12, BLOCK_END = 128, LOOKS = 56 / PEEK }; /* looks after a refill, which is 56 bits */

typedef struct { /* of a component's tables: for a DC symbol with what follows, and for what follows alone */
    Step steps[2][1 << PEEK];
    uint8_t counts[2][16], symbols[2][256]; /* of the tables */
    int is_made;
} Steps;

typedef struct { /* zeroed before its first use; keeps tables from image to image */
    Huffman tables[2][2]; /* DC and AC, by identifier */
    Steps steps[2][2];    /* for adding restart markers, by identifiers of both */
} Context;

typedef struct {
    uint8_t *at, *end;
} Scratch;

static inline void *take(Scratch *scratch, size_t num_bytes) { /* null where there is not enough */
    uint8_t *start = scratch->at + (-(uintptr_t)scratch->at & (ALIGNMENT - 1));
    if (start > scratch->end || (size_t)(scratch->end - start) < num_bytes) return NULL;
    scratch->at = start + num_bytes;
    return start;
}

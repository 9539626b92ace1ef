/* What callers lend for a call: a context a thread, which lasts, and scratch memory. Nothing is allocated here. */

#pragma once
#include <stddef.h>
#include <stdint.h>
#include "entropy.h"

enum { ALIGNMENT = 64 };

typedef struct { /* zeroed before its first use; keeps tables from image to image */
    Huffman tables[2][2]; /* DC and AC, by identifier */
    Steps steps[2][2];    /* to pass over blocks, by both identifiers */
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

/* The orders of pipeline/order/ORDER.md, sections 1 to 7 and 11, in C11: written from that page, for readers who
   implement it.

   It reads one case a line from standard input and writes its numbers, a line a case:

     key COUNT NUMBER... PURPOSE                         the key, in hexadecimal (section 2)
     permutation N KEY COUNT POSITION...                 P(N, KEY) at the positions (section 3)
     order KIND SEED EPOCH WINDOW SHARDS LENGTH... SELECTED SAMPLE... WEIGHTS WEIGHT... L HIDDEN SAMPLE... COUNT
       POSITION...                                       samples (sections 4, 5); SELECTED and WEIGHTS may be 0: all;
                                                         HIDDEN samples are left out (section 11)
     lanes SEED EPOCH G PIECES CLIPS LENGTH... HIDDEN SAMPLE... COUNT POSITION...
                                                         sample, valid, prev_exists of each position (sections 5, 11)
     mix SEED EPOCH N DATASETS STAGES (RATIO... UNTIL RAMP)... LENGTH... COUNT POSITION...
                                                         dataset and sample of each position (section 6); the datasets
                                                         are shuffled, each by the seed of its part; UNTIL of the last
                                                         stage, and of a mix without stages, is 0
     parts SEED EPOCH N PARTS RATIO... (SELECTED SAMPLE... WEIGHTS WEIGHT...)... COUNT POSITION...
                                                         samples of a mix of parts, shuffled; WEIGHTS may be 0
     stages SEED EPOCH L STAGES (UNTIL RAMP SELECTED SAMPLE... WEIGHTS WEIGHT... L_D)... COUNT POSITION...
                                                         sample of each position (section 6), shuffled; WEIGHTS may be 0
     window PAD STRIDE OFFSETS OFFSET... ROWS CLIP... ROWS FRAME... COUNT SAMPLE...
                                                         row and presence of each frame of each sample (section 7); the
                                                         sample's own row where PAD is mask or drop and a frame lacks
     batch L G R RANK STEP START                         position and validity of each row (section 1)

   Plain and slow on purpose: memory is never freed, and every search is linear. */

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u64;
typedef int64_t i64;
typedef unsigned __int128 u128;

static void *many(u64 count, size_t size) {
    void *found = calloc(count ? count : 1, size);
    if (!found) exit(2);
    return found;
}

/* SHAKE-128 (FIPS 202): bytes in, any number of bytes out. */

static u64 turned(u64 x, int by) { return by ? x << by | x >> (64 - by) : x; }

static void keccak(u64 s[25]) {
    static const int turn[25] = {0, 1, 62, 28, 27, 36, 44, 6, 55, 20, 3, 10, 43, 25, 39, 41, 45, 15, 21, 8, 18, 2, 61, 56, 14};
    unsigned lfsr = 1;
    for (int round = 0; round < 24; round++) {
        u64 c[5], b[25];
        for (int x = 0; x < 5; x++) c[x] = s[x] ^ s[x + 5] ^ s[x + 10] ^ s[x + 15] ^ s[x + 20];
        for (int i = 0; i < 25; i++) s[i] ^= c[(i + 4) % 5] ^ turned(c[(i + 1) % 5], 1);
        for (int x = 0; x < 5; x++)
            for (int y = 0; y < 5; y++) b[y + 5 * ((2 * x + 3 * y) % 5)] = turned(s[x + 5 * y], turn[x + 5 * y]);
        for (int y = 0; y < 25; y += 5)
            for (int x = 0; x < 5; x++) s[y + x] = b[y + x] ^ (~b[y + (x + 1) % 5] & b[y + (x + 2) % 5]);
        for (int j = 0; j < 7; j++) { /* the round constant, from its shift register */
            if (lfsr & 1) s[0] ^= (u64)1 << ((1 << j) - 1);
            lfsr = lfsr << 1 ^ (lfsr >> 7) * 0x171;
        }
    }
}

static void shake128(const unsigned char *data, u64 length, unsigned char *out, u64 wanted) {
    u64 s[25] = {0}, rate = 168, at = 0;
    for (u64 i = 0; i < length; i++) {
        s[at / 8] ^= (u64)data[i] << 8 * (at % 8);
        if (++at == rate) { keccak(s); at = 0; }
    }
    s[at / 8] ^= (u64)0x1f << 8 * (at % 8);
    s[rate / 8 - 1] ^= (u64)0x80 << 56;
    for (u64 i = 0; i < wanted; i++) {
        if (i % rate == 0) keccak(s);
        out[i] = s[i % rate / 8] >> 8 * (i % 8);
    }
}

static unsigned char *put(unsigned char *to, u128 number, int bytes) {
    for (int i = 0; i < bytes; i++, number >>= 8) *to++ = (unsigned char)number;
    return to;
}

/* Section 2. */

static u128 key(const char *purpose, int count, const u64 *numbers) {
    unsigned char data[512], out[16], *end = data;
    size_t length = strlen(purpose);
    if (length > 200 || count > 8) exit(2);
    memcpy(end, "fuelrail key 1", 14);
    end = put(end + 14, length, 8);
    memcpy(end, purpose, length);
    end += length;
    for (int i = 0; i < count; i++) end = put(end, numbers[i], 16);
    shake128(data, (u64)(end - data), out, 16);
    u128 found = 0;
    for (int i = 15; i >= 0; i--) found = found << 8 | out[i];
    return found;
}

static u128 key2(const char *purpose, u64 a, u64 b) { return key(purpose, 2, (u64[]){a, b}); }

/* Section 3. */

typedef struct { u64 n, a, b, words[8], *table; } Permutation;

static int by_number(const void *x, const void *y) {
    u64 a = *(const u64 *)x, b = *(const u64 *)y;
    return (a > b) - (a < b);
}

static Permutation permutation(u64 n, u128 k) {
    Permutation p = {.n = n};
    unsigned char seed[22 + 8 + 16];
    memcpy(seed, "fuelrail permutation 1", 22);
    put(put(seed + 22, n, 8), k, 16);
    u64 count = n <= 1024 ? n : 8, *words = many(count, 8);
    unsigned char *out = many(count, 8);
    shake128(seed, sizeof seed, out, 8 * count);
    for (u64 i = 0; i < 8 * count; i++) words[i / 8] |= (u64)out[i] << 8 * (i % 8);
    if (n <= 1024) {
        for (u64 i = 0; i < n; i++) words[i] = words[i] / 1024 * 1024 + i;
        qsort(words, n, 8, by_number);
        for (u64 i = 0; i < n; i++) words[i] %= 1024;
        p.table = words;
        return p;
    }
    u64 root = (u64)sqrt((double)n);
    while (root * root >= n) root--;
    while (root * root < n) root++; /* the square root, rounded up */
    p.a = root + root % 2;
    p.b = (n + p.a - 1) / p.a;
    memcpy(p.words, words, sizeof p.words);
    return p;
}

static u64 fmix64(u64 x) {
    x ^= x >> 33; x *= 0xff51afd7ed558ccd;
    x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53;
    return x ^ x >> 33;
}

static u64 at(const Permutation *p, u64 x) {
    if (p->table) return p->table[x];
    do {
        u64 left = x / p->b, right = x % p->b, size = p->a, other = p->b, spare;
        for (int i = 0; i < 8; i++) {
            left = (left + ((fmix64(right ^ p->words[i]) >> 32) * size >> 32)) % size;
            spare = left, left = right, right = spare;
            spare = size, size = other, other = spare;
        }
        x = left * p->b + right;
    } while (x >= p->n);
    return x;
}

/* Input. */

static u64 number(void) {
    u64 found;
    if (scanf("%" SCNu64, &found) != 1) exit(2);
    return found;
}

static u64 *numbers(u64 count) {
    u64 *found = many(count, 8);
    for (u64 i = 0; i < count; i++) found[i] = number();
    return found;
}

static double *doubles(u64 count) {
    double *found = many(count, sizeof *found);
    for (u64 i = 0; i < count; i++)
        if (scanf("%lf", found + i) != 1) exit(2);
    return found;
}

static int contains(u64 count, const u64 *values, u64 value) {
    for (u64 i = 0; i < count; i++)
        if (values[i] == value) return 1;
    return 0;
}

/* Section 4: the sample, among n selected ones, of each of L copies in stored order. */

static u64 *copies(u64 n, const double *weights, u64 length, u64 seed, u64 epoch) {
    u64 *found = many(length, 8), *ends = many(n, 8), total = 0;
    int bits = 0;
    double largest = 0;
    while (n >> bits) bits++;
    bits = 62 - bits < 32 ? 62 - bits : 32;
    for (u64 i = 0; i < n; i++) largest = fmax(largest, weights[i]);
    for (u64 i = 0; i < n; i++) ends[i] = total += (u64)rint(weights[i] / largest * ldexp(1, bits));
    u64 phase = (u64)(key2("order weights", seed, epoch) % total);
    for (u64 j = 0, sample = 0; j < length; j++) {
        while (ends[sample] <= ((u128)j * total + phase) / length) sample++;
        found[j] = sample;
    }
    return found;
}

/* Section 5: shuffled, sequential, windowed. */

static void order(void) {
    char kind[16];
    if (scanf("%15s", kind) != 1) exit(2);
    u64 seed = number(), epoch = number(), window = number(), num_shards = number(), *lengths = numbers(num_shards);
    u64 n = 0, num_selected = number(), *selected = numbers(num_selected), num_weights = number();
    double *weights = doubles(num_weights);
    for (u64 i = 0; i < num_shards; i++) n += lengths[i];
    u64 *shard_of = many(n, 8), length = number(), *copy = many(length, 8);
    u64 num_hidden = number(), *hidden = numbers(num_hidden), count = number(), *positions = numbers(count);
    for (u64 shard = 0, i = 0; shard < num_shards; shard++)
        for (u64 j = 0; j < lengths[shard]; j++) shard_of[i++] = shard;
    u64 *which = num_weights ? copies(num_weights, weights, length, seed, epoch) : NULL;
    for (u64 j = 0; j < length; j++) {
        u64 place = which ? which[j] : j;
        copy[j] = num_selected ? selected[place] : place;
    }
    u64 *placed = many(length, 8), filled = 0; /* the sample at each position */
    if (!strcmp(kind, "windowed")) {
        u64 *held = many(num_shards, 8), slots = 0;
        for (u64 shard = 0; shard < num_shards; shard++)
            for (u64 j = 0; j < length; j++)
                if (shard_of[copy[j]] == shard) { held[slots++] = shard; break; }
        Permutation shards = permutation(slots, key2("order windowed shards", seed, epoch));
        u64 windows = (slots + window - 1) / window, *inside = many(length, 8);
        for (u64 k = 0; k < windows; k++) {
            u64 m = 0;
            for (u64 slot = k * slots / windows; slot < (k + 1) * slots / windows; slot++)
                for (u64 j = 0; j < length; j++)
                    if (shard_of[copy[j]] == held[at(&shards, slot)]) inside[m++] = copy[j];
            Permutation samples = permutation(m, key("order windowed samples", 3, (u64[]){seed, epoch, k}));
            for (u64 q = 0; q < m; q++) placed[filled++] = inside[at(&samples, q)];
        }
    } else {
        Permutation p = permutation(length, key2("order shuffled", seed, epoch));
        for (; filled < length; filled++) placed[filled] = copy[strcmp(kind, "shuffled") ? filled : at(&p, filled)];
    }
    u64 remaining = 0; /* section 11 */
    for (u64 i = 0; i < length; i++)
        if (!contains(num_hidden, hidden, placed[i])) placed[remaining++] = placed[i];
    for (u64 i = 0; i < count; i++) {
        if (positions[i] >= remaining) exit(2);
        printf("%" PRIu64 " ", placed[positions[i]]);
    }
}

/* Sections 5 and 11: lanes. */

typedef struct { u64 sample; int is_first; } Frame; /* is_first: of its piece */

static void lanes(void) {
    u64 seed = number(), epoch = number(), num_lanes = number(), per_clip = number(), num_clips = number();
    u64 *clips = numbers(num_clips), num_hidden = number(), *hidden = numbers(num_hidden);
    u64 count = number(), *positions = numbers(count), num = 0, num_samples = 0;
    u64 *first = many(num_clips * per_clip, 8), *length = many(num_clips * per_clip, 8);
    for (u64 clip = 0; clip < num_clips; clip++) {
        u64 parts = clips[clip] < per_clip ? clips[clip] : per_clip;
        for (u64 part = 0; part < parts; part++, num++) {
            first[num] = num_samples;
            length[num] = clips[clip] / parts + (part < clips[clip] % parts);
            num_samples += length[num];
        }
    }
    /* Slots: falling lengths, each to the lane with the least; and the pieces that take them. */
    Permutation shuffled = permutation(num, key2("order lanes pieces", seed, epoch));
    u64 *piece = many(num, 8), *lane_of = many(num, 8), *load = many(num_lanes, 8);
    for (u64 i = 0; i < num; i++) {
        u64 to = i, next = at(&shuffled, i);
        for (; to && length[piece[to - 1]] < length[next]; to--) piece[to] = piece[to - 1];
        piece[to] = next;
    }
    for (u64 slot = 0; slot < num; slot++) {
        u64 lane = 0;
        for (u64 other = 1; other < num_lanes; other++)
            if (load[other] < load[lane]) lane = other;
        load[lane_of[slot] = lane] += length[piece[slot]];
    }
    /* The frames of each lane, in the order in which it shows them. */
    Permutation called = permutation(num_lanes, key2("order lanes", seed, epoch));
    Permutation place = permutation(num, key2("order lanes places", seed, epoch));
    Frame **frames = many(num_lanes, sizeof *frames);
    u64 *num_frames = many(num_lanes, 8);
    for (u64 lane = 0; lane < num_lanes; lane++) frames[lane] = many(num_samples, sizeof **frames);
    for (u64 turn = 0; turn < num; turn++)
        for (u64 slot = 0; slot < num; slot++) {
            if (at(&place, slot) != turn) continue;
            u64 lane = at(&called, lane_of[slot]), start = first[piece[slot]];
            int is_first = 1;
            for (u64 sample = start; sample < start + length[piece[slot]]; sample++) {
                if (!contains(num_hidden, hidden, sample)) {
                    frames[lane][num_frames[lane]++] = (Frame){sample, is_first};
                    is_first = 0;
                } else is_first = 1;
            }
        }
    for (u64 i = 0; i < count; i++) {
        u64 step = positions[i] / num_lanes, lane = positions[i] % num_lanes, past = step - num_frames[lane], size = 1;
        if (step < num_frames[lane]) {
            Frame frame = frames[lane][step];
            printf("%" PRIu64 " 1 %d ", frame.sample, !frame.is_first);
            continue;
        }
        while (!num_frames[lane]) lane = (lane + 1) % num_lanes;
        while (size < num_frames[lane] && !frames[lane][size].is_first) size++;
        printf("%" PRIu64 " 0 %d ", frames[lane][past % size].sample, past % size > 0);
    }
}

/* Section 6. */

/* The list f or g of a ramp: each dataset as often as the first ratios exceed the second ones. */
static u64 *turns(u64 m, const u64 *more, const u64 *less, u64 *count) {
    u64 total = 0;
    for (u64 d = 0; d < m; d++) total += more[d] > less[d] ? more[d] - less[d] : 0;
    u64 *found = many(total, 8);
    double *place = many(total, sizeof *place);
    *count = 0;
    for (u64 d = 0; d < m; d++)
        for (u64 j = 0; more[d] > less[d] && j < more[d] - less[d]; j++) {
            double at_place = (2 * j + 1) / (double)(more[d] - less[d]);
            u64 to = (*count)++;
            for (; to && place[to - 1] > at_place; to--) place[to] = place[to - 1], found[to] = found[to - 1];
            place[to] = at_place, found[to] = d;
        }
    return found;
}

typedef struct { u64 *ratio, until, ramp; } Stage;

/* The ratios of block b of a run, in blocks of some size. */
static u64 *held(u64 m, u64 num_stages, const Stage *stages, u64 size, u64 b) {
    u64 stage = 0, start = 0, *found = many(m, 8);
    while (stage < num_stages - 1 && b >= stages[stage].until / size) start = stages[stage++].until / size;
    memcpy(found, stages[stage].ratio, m * 8);
    if (!stages[stage].ramp) return found;
    u64 n = stages[stage].until / size - start, c = b - start, num;
    u64 *f = turns(m, found, stages[stage + 1].ratio, &num), *g = turns(m, stages[stage + 1].ratio, found, &num);
    for (u64 i = num * c * c / (2 * n); i < num * (c + 1) * (c + 1) / (2 * n); i++) found[f[i % num]]--, found[g[i % num]]++;
    return found;
}

static void mix(void) {
    u64 seed = number(), epoch = number(), blocks = number(), m = number(), num_stages = number(), size = 1;
    Stage *stages = many(num_stages, sizeof *stages);
    for (u64 k = 0; k < num_stages; k++) {
        u64 sum = 0, multiple = size;
        stages[k] = (Stage){numbers(m), 0, 0};
        stages[k].until = number(), stages[k].ramp = number();
        for (u64 d = 0; d < m; d++) sum += stages[k].ratio[d];
        while (multiple % sum) multiple += size;
        size = multiple;
    }
    for (u64 k = 0; k < num_stages; k++) {
        u64 sum = 0;
        for (u64 d = 0; d < m; d++) sum += stages[k].ratio[d];
        for (u64 d = 0; d < m; d++) stages[k].ratio[d] *= size / sum;
    }
    u64 *length = numbers(m), count = number(), *wanted = numbers(count);
    Permutation word = permutation((u64)1 << 62, key("order mix", 1, &seed));
    for (u64 i = 0; i < count; i++) {
        u64 block = epoch * blocks + wanted[i] / size, *words = many(size, 8), *sorted = many(size, 8);
        u64 entry = 0, dataset = 0, *ratio = held(m, num_stages, stages, size, block), end = ratio[0], earlier = 0;
        for (u64 k = 0; k < size; k++) sorted[k] = words[k] = at(&word, block * size + k);
        qsort(sorted, size, 8, by_number);
        while (words[entry] != sorted[wanted[i] % size]) entry++;
        while (entry >= end) end += ratio[++dataset];
        for (u64 k = end - ratio[dataset]; k < end; k++) earlier += words[k] < words[entry];
        for (u64 b = 0; b < block; b++) earlier += held(m, num_stages, stages, size, b)[dataset];
        u64 own = (u64)(key2("order mix part", seed, dataset) % ((u128)1 << 63));
        Permutation p = permutation(length[dataset], key2("order shuffled", own, earlier / length[dataset]));
        printf("%" PRIu64 " %" PRIu64 " ", dataset, at(&p, earlier % length[dataset]));
    }
}

/* A mix of parts of one split: of each the samples, and their weights or none. */
static void parts(void) {
    u64 seed = number(), epoch = number(), blocks = number(), m = number(), *ratio = numbers(m), size = 0;
    struct { u64 n, *samples, num_weights; double *weights; } *part = many(m, sizeof *part);
    for (u64 d = 0; d < m; d++) {
        size += ratio[d];
        part[d].samples = numbers(part[d].n = number());
        part[d].weights = doubles(part[d].num_weights = number());
    }
    Permutation word = permutation((u64)1 << 62, key("order mix", 1, &seed));
    for (u64 count = number(); count; count--) {
        u64 position = number(), block = epoch * blocks + position / size, *words = many(size, 8);
        u64 *sorted = many(size, 8), entry = 0, d = 0, end = ratio[0];
        for (u64 k = 0; k < size; k++) sorted[k] = words[k] = at(&word, block * size + k);
        qsort(sorted, size, 8, by_number);
        while (words[entry] != sorted[position % size]) entry++;
        while (entry >= end) end += ratio[++d];
        u64 u = block * ratio[d];
        for (u64 k = end - ratio[d]; k < end; k++) u += words[k] < words[entry];
        u64 part_seed = (u64)(key2("order mix part", seed, d) % ((u128)1 << 63)), n = part[d].n, turn = u / n;
        Permutation p = permutation(n, key2("order shuffled", part_seed, turn));
        u64 copy = at(&p, u % n);
        if (part[d].num_weights) copy = copies(n, part[d].weights, n, part_seed, turn)[copy];
        printf("%" PRIu64 " ", part[d].samples[copy]);
    }
}

static void staged(void) {
    u64 seed = number(), epoch = number(), length = number(), num = number();
    struct { u64 n, *samples, num_weights, length; double *weights; } *own = many(num, sizeof *own);
    Stage *stages = many(num, sizeof *stages);
    for (u64 d = 0; d < num; d++) {
        stages[d] = (Stage){many(num, 8), 0, 0};
        stages[d].ratio[d] = 1, stages[d].until = number(), stages[d].ramp = number();
        own[d].samples = numbers(own[d].n = number());
        own[d].weights = doubles(own[d].num_weights = number());
        own[d].length = number();
    }
    for (u64 count = number(); count; count--) {
        u64 position = epoch * length + number(), d = 0, u = 0;
        while (!held(num, num, stages, 1, position)[d]) d++;
        for (u64 b = 0; b < position; b++) u += held(num, num, stages, 1, b)[d];
        u64 its = d ? (u64)(key2("order stage", seed, d) % ((u128)1 << 63)) : seed, turn = u / own[d].length;
        Permutation p = permutation(own[d].length, key2("order shuffled", its, turn));
        u64 copy = at(&p, u % own[d].length);
        if (own[d].num_weights) copy = copies(own[d].n, own[d].weights, own[d].length, its, turn)[copy];
        printf("%" PRIu64 " ", own[d].samples[copy]);
    }
}

/* Section 7. */

static void window(void) {
    char pad[16];
    if (scanf("%15s", pad) != 1) exit(2);
    i64 stride = (i64)number();
    u64 num_offsets = number(), *offsets = numbers(num_offsets); /* those below 0 as 2^64 - x */
    u64 num_rows = number(), *clips = numbers(num_rows), *frames = numbers(number()), count = number();
    for (; count; count--) {
        u64 sample = number();
        i64 current = (i64)frames[sample];
        for (u64 i = 0; i < num_offsets; i++) {
            i64 frame = current + stride * (i64)offsets[i];
            u64 row = sample;
            int is_present = 0;
            for (u64 j = 0; j < num_rows && !is_present; j++) {
                i64 stored = (i64)frames[j], nearest = (i64)frames[row];
                if (clips[j] != clips[sample]) continue;
                if (stored == frame) {
                    is_present = 1;
                    row = j;
                } else if (!strcmp(pad, "repeat_edge")) {
                    if (frame < stored && stored <= current && stored < nearest) row = j;
                    if (frame > stored && stored >= current && stored > nearest) row = j;
                }
            }
            printf("%" PRIu64 " %d ", row, is_present);
        }
    }
}

/* Section 1. */

static void batch(void) {
    u64 length = number(), global = number(), ranks = number(), rank = number(), step = number(), start = number();
    for (u64 i = rank * global / ranks; i < (rank + 1) * global / ranks; i++) {
        u64 position = start + step * global + i;
        printf("%" PRIu64 " %d ", position % length, position < length);
    }
}

int main(void) {
    char name[16];
    while (scanf("%15s", name) == 1) {
        if (!strcmp(name, "key")) {
            u64 count = number(), *given = numbers(count);
            char purpose[128];
            if (scanf(" %127[^\n]", purpose) != 1) return 2;
            u128 k = key(purpose, (int)count, given);
            printf("%016" PRIx64 "%016" PRIx64, (u64)(k >> 64), (u64)k);
        } else if (!strcmp(name, "permutation")) {
            u64 n = number(), high, low;
            if (scanf("%16" SCNx64 "%16" SCNx64, &high, &low) != 2) return 2;
            Permutation p = permutation(n, (u128)high << 64 | low);
            for (u64 count = number(); count; count--) printf("%" PRIu64 " ", at(&p, number()));
        } else if (!strcmp(name, "order")) order();
        else if (!strcmp(name, "lanes")) lanes();
        else if (!strcmp(name, "mix")) mix();
        else if (!strcmp(name, "parts")) parts();
        else if (!strcmp(name, "stages")) staged();
        else if (!strcmp(name, "window")) window();
        else if (!strcmp(name, "batch")) batch();
        else return 2;
        puts("");
    }
    return 0;
}

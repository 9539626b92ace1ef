/* Prints a digest of all that the native decoder makes of files and of mutations of them, for processors to be compared.
 *
 * native_digest SEED COUNT FILE...: each file, and COUNT mutations of each, is decoded at 1/2 and 1/4, resampled and
 * given restart markers. Each has memory of its own, so that sanitizers see what goes beyond it. Compile it with the
 * other sources of the decoder. */

#include <stdio.h>
#include <stdlib.h>
#include "camera_jpeg.c"

size_t add_restarts_scratch_bytes(size_t num_bytes);
size_t add_restarts_room_bytes(size_t num_bytes);
int64_t add_restarts(Context *context, uint8_t *scratch, size_t scratch_bytes, const uint8_t *data, size_t size,
                     uint8_t *room, size_t room_bytes);

static uint64_t digest = 0xcbf29ce484222325u, state = 1;
static long num_pictures, num_resized, num_rewritten;

static void add(const void *bytes, size_t num_bytes) { /* FNV-1a */
    for (size_t i = 0; i < num_bytes; i++) digest = (digest ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u;
}

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % below;
}

static void look_at(Context *context, const uint8_t *data, size_t size, int width, int height) {
    enum { OUT_WIDTH = 117, OUT_HEIGHT = 61 };
    static uint8_t planes[3][OUT_HEIGHT][OUT_WIDTH];
    size_t scratch_bytes = camera_jpeg_scratch_bytes(size, width, OUT_WIDTH, OUT_HEIGHT);
    uint8_t *scratch = malloc(scratch_bytes), *pixels = calloc((size_t)width * (size_t)height, 4);
    for (int factor = 2; factor <= 4; factor += 2) {
        int columns = (width + factor - 1) / factor, rows = (height + factor - 1) / factor;
        if (!camera_jpeg_picture(context, scratch, scratch_bytes, data, size, width, height, factor, 0, rows, pixels,
                                 4 * columns)) {
            add(pixels, 4 * (size_t)columns * (size_t)rows);
            num_pictures++;
        }
        double scale = 0.6 + 0.1 * draw(9);
        int is_flipped = (int)draw(2);
        Resize wanted = {is_flipped ? -scale : scale, is_flipped ? OUT_WIDTH : 0, scale * 0.9, -3.25,
                         OUT_WIDTH,                   OUT_HEIGHT,                 3,           2,
                         50,                          40,                         sizeof planes[0],
                         sizeof planes[0][0],         planes[0][0]};
        Job job = {data, size, width, height, factor, 0, wanted};
        camera_jpeg_resized(context, scratch, scratch_bytes, &job, 1);
        if (!job.declined) {
            add(planes, sizeof planes);
            num_resized++;
        }
    }
    free(scratch);
    free(pixels);
    scratch_bytes = add_restarts_scratch_bytes(size);
    scratch = malloc(scratch_bytes);
    uint8_t *room = malloc(add_restarts_room_bytes(size));
    int64_t outcome =
        add_restarts(context, scratch, scratch_bytes, data, size, room, add_restarts_room_bytes(size));
    add(&outcome, sizeof outcome);
    if (outcome > 0) {
        add(room, (size_t)outcome);
        num_rewritten++;
    }
    free(scratch);
    free(room);
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Flips, cuts, removes, repeats or overwrites, or lies about the size; returns the new length. */
static size_t mutate(uint8_t *data, size_t size) {
    size_t at = draw((uint32_t)size), length = smaller(size - at, 1 + draw(600));
    switch (draw(8)) {
    case 0: return at < 4 ? 4 : at;
    case 1: memmove(data + at, data + at + length, size - at - length); return size - length;
    case 2: memmove(data + at + length, data + at, size - at); return size + length;
    case 3:
        while (length--) data[at + length] = (uint8_t)draw(256);
        return size;
    case 4:
        for (at = 2; at + 9 < size && !(data[at] == 0xFF && data[at + 1] == 0xC0); at++) continue;
        for (int i = 5; i < 9 && at + 9 < size; i++)
            if (draw(2)) data[at + (size_t)i] = i % 2 ? (uint8_t)draw(3) : (uint8_t)draw(256);
        return size;
    default:
        for (uint32_t flips = 1 + draw(4); flips; flips--) data[draw((uint32_t)size)] ^= (uint8_t)(1 << draw(8));
        return size;
    }
}

int main(int num_arguments, char **arguments) {
    enum { MAX_BYTES = 1 << 20, MAX_PIXELS = 1 << 20 };
    static uint8_t data[MAX_BYTES], changed[2 * MAX_BYTES];
    Context *context = calloc(1, sizeof *context);
    if (num_arguments < 3) return 1;
    state = strtoull(arguments[1], NULL, 10);
    int count = atoi(arguments[2]);
    for (int i = 3; i < num_arguments; i++) {
        FILE *stream = fopen(arguments[i], "rb");
        if (!stream) return 1;
        size_t size = fread(data, 1, sizeof data, stream);
        fclose(stream);
        for (int number = 0; number <= count; number++) {
            memcpy(changed, data, size);
            size_t length = number ? mutate(changed, size) : size;
            uint8_t *own = malloc(length);
            memcpy(own, changed, length);
            File said;
            int is_told = !read_header(&said, context, own, length) && said.width && said.height &&
                          said.width * (int64_t)said.height <= MAX_PIXELS;
            look_at(context, own, length, is_told ? said.width : 64, is_told ? said.height : 64);
            free(own);
        }
    }
    free(context);
    printf("%016llx %ld %ld %ld\n", (unsigned long long)digest, num_pictures, num_resized, num_rewritten);
    return 0;
}

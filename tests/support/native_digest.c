/* Prints a digest of all that the native decoder makes of files and of mutations of them, for processors to be compared.
 *
 * native_digest COUNT FILE...: each file, and COUNT mutations of each, is decoded at 1/2 and 1/4, resampled, given
 * restart markers and cut to some rows. Compile it with the other sources of the decoder. */

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

int main(int num_arguments, char **arguments) {
    Context *context = calloc(1, sizeof *context);
    int count = num_arguments > 1 ? atoi(arguments[1]) : 0;
    for (int i = 2; i < num_arguments; i++) {
        FILE *stream = fopen(arguments[i], "rb");
        if (!stream) return 1;
        static uint8_t data[1 << 20], changed[1 << 20];
        size_t size = fread(data, 1, sizeof data, stream);
        fclose(stream);
        File file;
        if (read_header(&file, context, data, size)) return 2;
        look_at(context, data, size, file.width, file.height);
        for (int number = 0; number < count; number++) {
            size_t length = size;
            memcpy(changed, data, size);
            for (uint32_t flips = 1 + draw(4); flips; flips--)
                changed[draw((uint32_t)size)] ^= (uint8_t)(1 << draw(8));
            if (draw(8) == 0) length = 4 + draw((uint32_t)size - 4);
            look_at(context, changed, length, file.width, file.height);
        }
    }
    free(context);
    printf("%016llx %ld %ld %ld\n", (unsigned long long)digest, num_pictures, num_resized, num_rewritten);
    return 0;
}

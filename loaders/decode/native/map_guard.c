/* Makes a mapped file that is cut while it is read an error of the sample, not the end of the process.
 *
 * Touching a mapped page beyond a file's end raises SIGBUS. Where the address lies in a mapping that was added here, the
 * handler puts a page of zeros in its place, notes where, and lets the thread continue; the reader of the mapping asks
 * afterwards (map_guard_hull) and refuses what was read. A mapping with a text gets no page: the text is written to
 * standard error, and the process ends as it would have. All other addresses are left to the handler that was there
 * before. The handler calls only what is safe in one (signal-safety(7); mmap is a bare system call).
 *
 * map_guard_add and map_guard_remove must be called by one thread at a time: Python calls them under its lock.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SLOTS = 16384 };

typedef struct {
    _Atomic uintptr_t start; /* 0: free */
    _Atomic size_t size;
    _Atomic size_t low, high; /* bytes replaced so far lie in [low, high) */
    const char *_Atomic text;
} Slot;

static Slot slots[SLOTS];
static _Atomic int num_used;
static struct sigaction previous;
static uintptr_t page_bytes;
static _Atomic int num_foreign;

_Atomic long map_guard_faults; /* pages replaced in this process */

static int replace_page(Slot *slot, uintptr_t start, uintptr_t address) {
    uintptr_t page = address & -page_bytes;
    if (mmap((void *)page, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        return 0;
    size_t low = page - start, high = low + page_bytes, seen = atomic_load(&slot->low);
    while (low < seen && !atomic_compare_exchange_weak(&slot->low, &seen, low)) {}
    seen = atomic_load(&slot->high);
    while (high > seen && !atomic_compare_exchange_weak(&slot->high, &seen, high)) {}
    atomic_fetch_add(&map_guard_faults, 1);
    return 1;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    int saved = errno, count = atomic_load(&num_used);
    uintptr_t address = (uintptr_t)info->si_addr;
    (void)context;
    for (int i = 0; info->si_code == BUS_ADRERR && i < count; i++) {
        uintptr_t start = atomic_load(&slots[i].start);
        if (!start || address < start || address - start >= atomic_load(&slots[i].size)) continue;
        const char *text = atomic_load(&slots[i].text);
        if (text) {
            ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
            (void)ignored;
        } else if (replace_page(&slots[i], start, address)) {
            errno = saved;
            return;
        }
        break;
    }
    /* Back to who was there before, who meets the same fault again; the second time to the default. */
    struct sigaction none = {.sa_handler = SIG_DFL};
    sigaction(SIGBUS, atomic_fetch_add(&num_foreign, 1) ? &none : &previous, NULL);
    if (info->si_code <= 0) raise(number); /* sent by a process: nothing would fault again */
    errno = saved;
}

/* Take over SIGBUS, unless it is ours already. Returns 0 or an error number. */
int map_guard_install(void) {
    struct sigaction now, ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (sigaction(SIGBUS, NULL, &now)) return errno;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) return 0;
    previous = now;
    atomic_store(&num_foreign, 0);
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, &ours, NULL) ? errno : 0;
}

/* Guard a mapping; returns its slot, or -1 where there is none left. `text` must live as long. */
int map_guard_add(void *start, size_t size, const char *text) {
    for (int i = 0; i < SLOTS; i++) {
        if (atomic_load(&slots[i].start)) continue;
        atomic_store(&slots[i].size, size);
        atomic_store(&slots[i].low, SIZE_MAX);
        atomic_store(&slots[i].high, 0);
        atomic_store(&slots[i].text, text);
        atomic_store(&slots[i].start, (uintptr_t)start);
        if (i >= atomic_load(&num_used)) atomic_store(&num_used, i + 1);
        return i;
    }
    return -1;
}

/* The bytes of a mapping that were replaced lie in [hull[0], hull[1]); none where the first is not below the second. */
void map_guard_hull(int slot, size_t hull[2]) {
    hull[0] = atomic_load(&slots[slot].low);
    hull[1] = atomic_load(&slots[slot].high);
}

/* To be called before the mapping goes. */
void map_guard_remove(int slot) { atomic_store(&slots[slot].start, 0); }

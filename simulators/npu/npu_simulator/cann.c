/* Plays CANN's runtime for one process: memory of the host with a limit, streams that are always done, events by the
 * clock. Everything else that torch_npu links against is a symbol that returns 0 (written by `stub.py`). */

#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { OK = 0, BAD_PARAMETER = 107000, NO_MEMORY = 207001, UNSUPPORTED = 500002, MAX_CARDS = 64, ALIGNMENT = 512 };
enum { CUBE_CORES = 24, VECTOR_CORES = 48 }; /* of a 910B */

static struct {
    uint32_t cards;
    size_t memory_bytes;
    char soc[32];
    char version[32];
} pretended = {1, (size_t)64 << 30, "Ascend910B3", "8.5.0"};

static _Atomic size_t used_bytes[MAX_CARDS];
static _Thread_local int32_t current;

/* In front of each block of device memory, in ALIGNMENT bytes of its own. */
struct block {
    size_t size;
    int32_t card;
    void *start;
};

/* What the process sees from now on; to be called before torch_npu is imported. */
int npu_sim_pretend(uint32_t cards, size_t memory_bytes, const char *soc, const char *version)
{
    if (cards > MAX_CARDS)
        return BAD_PARAMETER;
    pretended.cards = cards;
    pretended.memory_bytes = memory_bytes;
    snprintf(pretended.soc, sizeof pretended.soc, "%s", soc);
    snprintf(pretended.version, sizeof pretended.version, "%s", version);
    return OK;
}

/* --- devices ----------------------------------------------------------------------------------------------------- */

int aclrtGetDeviceCount(uint32_t *count) { *count = pretended.cards; return OK; }
int aclrtGetDevice(int32_t *card) { *card = current; return OK; }
const char *aclrtGetSocName(void) { return pretended.soc; }

int aclrtSetDevice(int32_t card)
{
    if (card < 0 || (uint32_t)card >= pretended.cards)
        return BAD_PARAMETER;
    current = card;
    return OK;
}

int aclrtGetPrimaryCtxState(int32_t card, uint32_t *flags, int32_t *active)
{
    (void)card;
    if (flags)
        *flags = 0;
    *active = 1;
    return OK;
}

/* A context is a card: its number plus one, because NULL is no context. */
int aclrtGetCurrentContext(void **context) { *context = (void *)(intptr_t)(current + 1); return OK; }

int aclrtSetCurrentContext(void *context)
{
    return aclrtSetDevice((int32_t)(intptr_t)context - 1);
}

int aclrtGetDeviceInfo(uint32_t card, int32_t attribute, int64_t *value)
{
    (void)card;
    switch (attribute) {
    case 101: case 102: *value = CUBE_CORES; break;
    case 201: *value = VECTOR_CORES; break;
    case 301: *value = (int64_t)pretended.memory_bytes; break;
    default: *value = 0;
    }
    return OK;
}

int aclGetDeviceCapability(uint32_t card, int32_t kind, int64_t *value)
{
    (void)card;
    *value = kind == 1 ? VECTOR_CORES : CUBE_CORES;
    return OK;
}

int aclrtDeviceGetUuid(int32_t card, void *uuid)
{
    memset(uuid, 0, 16);
    ((unsigned char *)uuid)[15] = (unsigned char)card;
    return OK;
}

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t card, int32_t peer) { *can = card != peer; return OK; }

/* --- memory ------------------------------------------------------------------------------------------------------ */

static int take(size_t size)
{
    if (atomic_fetch_add(&used_bytes[current], size) + size <= pretended.memory_bytes)
        return OK;
    atomic_fetch_sub(&used_bytes[current], size);
    return NO_MEMORY;
}

int aclrtMalloc(void **out, size_t size, int32_t policy)
{
    void *start;
    (void)policy;
    if (take(size))
        return NO_MEMORY;
    if (posix_memalign(&start, ALIGNMENT, size + 2 * ALIGNMENT)) {
        atomic_fetch_sub(&used_bytes[current], size);
        return NO_MEMORY;
    }
    *(struct block *)start = (struct block){size, current, start};
    *out = (char *)start + ALIGNMENT;
    return OK;
}

int aclrtMallocAlign32(void **out, size_t size, int32_t policy) { return aclrtMalloc(out, size, policy); }

int aclrtFree(void *memory)
{
    if (memory) {
        struct block *block = (struct block *)((char *)memory - ALIGNMENT);
        atomic_fetch_sub(&used_bytes[block->card], block->size);
        free(block->start);
    }
    return OK;
}

int aclrtGetMemInfo(int32_t kind, size_t *available, size_t *total)
{
    (void)kind;
    *total = pretended.memory_bytes;
    *available = pretended.memory_bytes - atomic_load(&used_bytes[current]);
    return OK;
}

/* Segments that grow: addresses are reserved, memory is counted, and both meet when they are mapped. */
int aclrtReserveMemAddress(void **out, size_t size, size_t alignment, void *wish, uint64_t flags)
{
    (void)alignment, (void)wish, (void)flags;
    *out = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *out == MAP_FAILED ? NO_MEMORY : OK;
}

int aclrtMallocPhysical(void **out, size_t size, const void *kind, uint64_t flags)
{
    (void)kind, (void)flags;
    if (take(size))
        return NO_MEMORY;
    struct block *block = malloc(sizeof *block);
    *block = (struct block){size, current, NULL};
    *out = block;
    return OK;
}

int aclrtMapMem(void *address, size_t size, size_t offset, void *memory, uint64_t flags)
{
    (void)offset, (void)flags;
    ((struct block *)memory)->start = address;
    return mprotect(address, size, PROT_READ | PROT_WRITE) ? NO_MEMORY : OK;
}

int aclrtFreePhysical(void *memory)
{
    struct block *block = memory;
    if (block->start) /* what was written there is gone, and the host has its memory back */
        mmap(block->start, block->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    atomic_fetch_sub(&used_bytes[block->card], block->size);
    free(block);
    return OK;
}

int aclrtMallocHost(void **out, size_t size)
{
    return posix_memalign(out, ALIGNMENT, size ? size : 1) ? NO_MEMORY : OK;
}

int aclrtMallocHostWithCfg(void **out, uint64_t size, void *config) { (void)config; return aclrtMallocHost(out, size); }
int aclrtFreeHost(void *memory) { free(memory); return OK; }

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int32_t kind)
{
    (void)kind;
    if (size > room)
        return BAD_PARAMETER;
    memmove(to, from, size);
    return OK;
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int32_t kind, void *stream)
{
    (void)stream;
    return aclrtMemcpy(to, room, from, size, kind);
}

int aclrtMemset(void *to, size_t room, int32_t value, size_t size)
{
    if (size > room)
        return BAD_PARAMETER;
    memset(to, value, size);
    return OK;
}

int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, void *stream)
{
    (void)stream;
    return aclrtMemset(to, room, value, size);
}

/* --- streams and events: everything is done as soon as it is asked for ------------------------------------------- */

static int handle(void **out) { *out = calloc(1, sizeof(struct timespec)); return *out ? OK : NO_MEMORY; }

int aclrtCreateStream(void **out) { return handle(out); }

int aclrtCreateStreamWithConfig(void **out, uint32_t priority, uint32_t flag)
{
    (void)priority, (void)flag;
    return handle(out);
}

int aclrtDestroyStream(void *stream) { free(stream); return OK; }
int aclrtDestroyStreamForce(void *stream) { free(stream); return OK; }
int aclrtStreamQuery(void *stream, int32_t *status) { (void)stream; *status = 0; return OK; }
int aclrtStreamGetId(void *stream, int32_t *id) { *id = (int32_t)((uintptr_t)stream >> 4); return OK; }

int aclrtCreateEvent(void **out) { return handle(out); }
int aclrtCreateEventWithFlag(void **out, uint32_t flag) { (void)flag; return handle(out); }
int aclrtCreateEventExWithFlag(void **out, uint32_t flag) { (void)flag; return handle(out); }
int aclrtDestroyEvent(void *event) { free(event); return OK; }
int aclrtQueryEventStatus(void *event, int32_t *status) { (void)event; *status = 1; return OK; }
int aclrtQueryEventWaitStatus(void *event, int32_t *status) { (void)event; *status = 0; return OK; }

int aclrtRecordEvent(void *event, void *stream)
{
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, event);
    return OK;
}

int aclrtEventElapsedTime(float *ms, void *start, void *end)
{
    const struct timespec *a = start, *b = end;
    *ms = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) * 1e-6);
    return OK;
}

/* --- operators: none is here, so that none is left undone without a word ----------------------------------------- */

const char *aclGetRecentErrMsg(void) { return "the simulated NPU (device=npu_sim) does not know this operator"; }
int aclopCompileAndExecute(void) { return UNSUPPORTED; }
int aclopCompileAndExecuteV2(void) { return UNSUPPORTED; }
int rtKernelLaunch(void) { return UNSUPPORTED; }
int aclrtLaunchKernelWithHostArgs(void) { return UNSUPPORTED; }

/* --- what initialisation asks ------------------------------------------------------------------------------------ */

size_t aclGetCompileoptSize(int32_t option) { (void)option; return 64; }

int aclGetCompileopt(int32_t option, char *value, size_t length)
{
    (void)option;
    if (length)
        memset(value, 0, length);
    return OK;
}

struct version { char whole[128], parts[4][64], reserved[128]; };

int aclsysGetCANNVersion(int32_t package, struct version *version)
{
    (void)package;
    memset(version, 0, sizeof *version);
    snprintf(version->whole, sizeof version->whole, "%s", pretended.version);
    return OK;
}

int aclsysGetVersionStr(char *package, char *version)
{
    (void)package;
    strcpy(version, pretended.version);
    return OK;
}

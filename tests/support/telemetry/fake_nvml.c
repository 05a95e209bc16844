/* A libnvidia-ml.so.1 of two GPUs that exist only here; tests/support/telemetry/fake_nvml.py compiles it.
 *
 * What happens to them stands in the file that FAKE_NVML names, which each call reads anew:
 *
 *     no-driver     there is no driver
 *     hang          a call for the second GPU does not return while this stands there
 *     lost          the second GPU has fallen off the bus
 *     xid           the second GPU reports XID 79, once
 *     storm         it reports 30 others, 1001 to 1030
 *
 * Compiled with -DBARE it has only what every driver has. Structures and numbers are those of
 * NVIDIA's nvml.h.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15 };
enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3 };

typedef struct gpu { int index; } *Gpu;
static struct gpu gpus[] = {{0}, {1}};

static int is_told(const char *word) {
    const char *path = getenv("FAKE_NVML");
    char text[256] = "";
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file) {
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
    }
    return strstr(text, word) != NULL;
}

static int answer(Gpu gpu) {
    if (gpu->index != 1) return SUCCESS;
    while (is_told("hang")) usleep(10000);
    return is_told("lost") ? GPU_IS_LOST : SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    return is_told("no-driver") ? DRIVER_NOT_LOADED : SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = sizeof gpus / sizeof *gpus;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu *gpu) {
    *gpu = &gpus[index];
    return answer(*gpu);
}

int nvmlDeviceGetUUID(Gpu gpu, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-fake-%d", gpu->index);
    return answer(gpu);
}

typedef struct { unsigned gpu, memory; } Utilization;

int nvmlDeviceGetUtilizationRates(Gpu gpu, Utilization *rates) {
    rates->gpu = 75 + gpu->index;
    rates->memory = 40;
    return answer(gpu);
}

int nvmlDeviceGetPowerUsage(Gpu gpu, unsigned *milliwatts) {
    *milliwatts = 350500;
    return answer(gpu);
}

#ifndef BARE

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory;

int nvmlDeviceGetMemoryInfo_v2(Gpu gpu, Memory *memory) {
    memory->total = 85899345920;
    memory->reserved = 500000000;
    memory->used = 60000000000;
    memory->free = memory->total - memory->reserved - memory->used;
    return answer(gpu);
}

int nvmlDeviceGetEnforcedPowerLimit(Gpu gpu, unsigned *milliwatts) {
    *milliwatts = 700000;
    return answer(gpu);
}

int nvmlDeviceGetTotalEnergyConsumption(Gpu gpu, unsigned long long *millijoules) {
    *millijoules = 123456789000;
    return answer(gpu);
}

int nvmlDeviceGetTemperature(Gpu gpu, int sensor, unsigned *celsius) {
    *celsius = 61;
    return answer(gpu);
}

int nvmlDeviceGetClockInfo(Gpu gpu, int domain, unsigned *megahertz) {
    *megahertz = domain == 1 ? 1980 : 2619; /* NVML_CLOCK_SM, NVML_CLOCK_MEM */
    return answer(gpu);
}

int nvmlDeviceGetTotalEccErrors(Gpu gpu, int type, int counter, unsigned long long *count) {
    *count = type == 0 ? 7 : 2; /* corrected, uncorrected */
    return answer(gpu);
}

int nvmlDeviceGetRemappedRows(
    Gpu gpu, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
    *correctable = 3;
    *uncorrectable = 1;
    *pending = 1;
    *failed = 0;
    return answer(gpu);
}

int nvmlDeviceGetPcieReplayCounter(Gpu gpu, unsigned *count) {
    *count = 5;
    return answer(gpu);
}

int nvmlDeviceGetCurrPcieLinkGeneration(Gpu gpu, unsigned *generation) {
    *generation = 5;
    return answer(gpu);
}

int nvmlDeviceGetCurrPcieLinkWidth(Gpu gpu, unsigned *width) {
    *width = 16;
    return answer(gpu);
}

int nvmlDeviceGetNvLinkState(Gpu gpu, unsigned link, unsigned *is_active) {
    *is_active = link != 3; /* one of them is down */
    return answer(gpu);
}

int nvmlDeviceGetCurrentClocksEventReasons(Gpu gpu, unsigned long long *reasons) {
    *reasons = 0x40 | 0x04; /* too hot, and at its power limit */
    return answer(gpu);
}

typedef struct {
    unsigned id, scope;
    long long timestamp, latency;
    int type, result;
    union { unsigned u; unsigned long long ull; } value;
} Field;

static void read_field(Gpu gpu, Field *field) {
    unsigned whole = 0;
    unsigned long long large = 0;
    switch (field->id) {
    case 82: whole = 80; break;                                     /* memory temperature */
    case 91: whole = 18; break;                                     /* NVLinks */
    case 52: large = 11; break;                                     /* NVLink: replays */
    case 59: large = 12; break;                                     /* recoveries */
    case 38: large = 13; break;                                     /* checksums */
    case 138: large = field->scope == 0xFFFFFFFF ? 4096 : 0; break; /* KiB of all links, sent */
    case 139: large = field->scope == 0xFFFFFFFF ? 2048 : 0; break; /* received */
    case 197: large = 1000001; break;                               /* PCIe: bytes sent */
    case 198: large = 2000002; break;                               /* received */
    case 173: whole = 21; break;                                    /* correctable errors */
    case 179: whole = 22; break;                                    /* not fatal */
    case 180: whole = 23; break;                                    /* fatal */
    case 230: whole = gpu->index ? 1 : 0; break;                    /* the second needs a reset */
    default: break;
    }
    /* The first GPU counts the ns for which it was throttled, the second knows only that it is. */
    if (gpu->index == 0 && (field->id == 74 || field->id == 76)) large = 1500000000;
    if (gpu->index == 0 && field->id >= 269 && field->id <= 271) large = 2500000000;
    field->result = whole || large || field->id == 230 ? SUCCESS : NOT_SUPPORTED;
    field->type = large ? UNSIGNED_LONG_LONG : UNSIGNED_INT;
    if (large) field->value.ull = large;
    else field->value.u = whole;
}

int nvmlDeviceGetFieldValues(Gpu gpu, int count, Field *fields) {
    for (int i = 0; i < count; i++) read_field(gpu, &fields[i]);
    return answer(gpu);
}

typedef struct {
    Gpu gpu;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} Event;

int nvmlEventSetCreate(void **set) {
    *set = gpus;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Gpu gpu, unsigned long long types, void *set) {
    return types == 8 ? answer(gpu) : NOT_SUPPORTED; /* nvmlEventTypeXidCriticalError */
}

int nvmlEventSetWait_v2(void *set, Event *event, unsigned milliseconds) {
    static int is_reported, next = 1001;
    int is_storm = next <= 1030 && is_told("storm");
    int is_xid = is_told("xid") && !is_reported;
    if (!is_storm && !is_xid) {
        usleep(milliseconds * 1000);
        return TIMEOUT;
    }
    usleep(1000);
    event->gpu = &gpus[1];
    event->data = is_storm ? next++ : 79;
    is_reported |= is_xid;
    return SUCCESS;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for NVIDIA's libnvidia-ml.so.1, for hosts without a GPU. Structure layouts, symbol names and
 * return codes are those of nvidia-ml-py; values come from the text file named by NVML_STAND_IN_STATE, which is
 * read again on every call, so that a test changes what a "GPU" says by replacing that file (write and rename).
 *
 * State, one key=value per line, `#` starts a comment line, the last line of a key wins. N is a GPU's index.
 *
 *   driver, nvml                versions                    count               number of GPUs
 *   init                        ok, or an error name: what nvmlInit answers
 *   error.FUNCTION              an error name: what that function answers (for every GPU)
 *   hang                        name of a function that does not return while the line is there (`N.hang`: for one GPU)
 *   exclusive                   1: abort() when two threads are inside the library at once
 *   N.lost                      1: every query of this GPU answers GPU_IS_LOST
 *   N.error.FUNCTION            an error name, for one GPU
 *   N.name N.uuid N.serial      text, passed on byte by byte
 *   N.pci                       domain:bus:device.function, hexadecimal
 *   N.numa_node                 node of the GPU's memory affinity
 *   N.memory_total N.memory_used N.memory_reserved          bytes
 *   N.utilization N.memory_utilization                      percent
 *   N.temperature               degrees Celsius
 *   N.power N.power_limit       milliwatts                  N.energy            millijoules
 *   N.clock_graphics N.clock_sm N.clock_memory              MHz
 *   N.ecc_corrected N.ecc_uncorrected                       counts
 *   N.pcie_generation N.pcie_width N.pcie_max_generation N.pcie_max_width
 *
 * A key that is missing answers NOT_SUPPORTED, a number that does not parse answers UNKNOWN, and a function that is
 * not written here is a missing symbol (FUNCTION_NOT_FOUND in nvidia-ml-py). Error names are those of errors[] below;
 * init=lib_mismatch is accepted for lib_rm_version_mismatch.
 * Build with -DWITHOUT_MEMORY_V2 or -DWITHOUT_TEMPERATURE_V for a library of an older driver.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

typedef int nvml_return;
typedef unsigned long long u64;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999,
};

static const struct { nvml_return code; const char *name, *text; } errors[] = {
    {SUCCESS, "ok", "Success"},
    {UNINITIALIZED, "uninitialized", "Uninitialized"},
    {INVALID_ARGUMENT, "invalid_argument", "Invalid Argument"},
    {NOT_SUPPORTED, "not_supported", "Not Supported"},
    {4, "no_permission", "Insufficient Permissions"},
    {NOT_FOUND, "not_found", "Not Found"},
    {INSUFFICIENT_SIZE, "insufficient_size", "Insufficient Size"},
    {DRIVER_NOT_LOADED, "driver_not_loaded", "Driver Not Loaded"},
    {10, "timeout", "Timeout"},
    {GPU_IS_LOST, "gpu_is_lost", "GPU is lost"},
    {16, "reset_required", "GPU requires reset"},
    {18, "lib_rm_version_mismatch", "Driver/library version mismatch"},
    {18, "lib_mismatch", "Driver/library version mismatch"},
    {ARGUMENT_VERSION_MISMATCH, "argument_version_mismatch", "Argument version mismatch"},
    {28, "gpu_not_found", "GPU not found"},
    {UNKNOWN, "unknown", "Unknown Error"},
};

enum { MAX_GPUS = 64, LINE = 1024 };
typedef struct { int index; } gpu;
static gpu gpus[MAX_GPUS];
static atomic_int initialized;
static atomic_int inside;

/* ---- state ------------------------------------------------------------------------------------------------- */

/* Copies the value of `key` to `out` (of LINE bytes). Returns 1 when the key is there, 0 when not, -1 without a state file. */
static int state_text(const char *key, char *out)
{
    const char *path = getenv("NVML_STAND_IN_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[LINE];
    size_t length = strlen(key);
    int found = 0;
    if (!file)
        return -1;
    while (fgets(line, sizeof line, file)) {
        if (line[0] == '#' || strncmp(line, key, length) || line[length] != '=')
            continue;
        line[strcspn(line, "\r\n")] = 0;
        strcpy(out, line + length + 1);
        found = 1;
    }
    fclose(file);
    return found;
}

static nvml_return parse(const char *text, u64 *value)
{
    char *end;
    errno = 0;
    *value = strtoull(text, &end, 0);
    return errno || end == text || *end ? UNKNOWN : SUCCESS;
}

static nvml_return error_code(const char *name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (!strcasecmp(name, errors[i].name))
            return errors[i].code;
    return UNKNOWN;
}

static int gpu_state(const gpu *device, const char *key, char *out)
{
    char full[LINE];
    snprintf(full, sizeof full, "%d.%s", device->index, key);
    return state_text(full, out);
}

static nvml_return gpu_number(const gpu *device, const char *key, u64 *value)
{
    char text[LINE];
    return gpu_state(device, key, text) == 1 ? parse(text, value) : NOT_SUPPORTED;
}

/* ---- entering and leaving ---------------------------------------------------------------------------------- */

static int enter(void)
{
    char text[LINE];
    if (atomic_fetch_add(&inside, 1) > 0 && state_text("exclusive", text) == 1 && !strcmp(text, "1")) {
        fputs("nvml stand-in: entered by two threads at once\n", stderr);
        abort();
    }
    return 0;
}

static void leave(int *guard)
{
    (void)guard;
    atomic_fetch_sub(&inside, 1);
}

static int hangs(const char *function, const gpu *device)
{
    char text[LINE];
    return (state_text("hang", text) == 1 && !strcmp(text, function)) ||
           (device && gpu_state(device, "hang", text) == 1 && !strcmp(text, function));
}

/* What every call goes through: hang, then the errors that do not depend on the arguments. */
static nvml_return admit(const char *function, const gpu *device, int needs_device)
{
    char key[LINE], text[LINE];
    const struct timespec pause = {0, 10 * 1000 * 1000};
    while (hangs(function, device))
        nanosleep(&pause, NULL);
    if (!initialized)
        return UNINITIALIZED;
    if (needs_device && (device < gpus || device >= gpus + MAX_GPUS))
        return INVALID_ARGUMENT;
    if (needs_device && gpu_state(device, "lost", text) == 1 && !strcmp(text, "1"))
        return GPU_IS_LOST;
    snprintf(key, sizeof key, "error.%s", function);
    if ((needs_device && gpu_state(device, key, text) == 1) || state_text(key, text) == 1)
        return error_code(text);
    return SUCCESS;
}

#define ENTER(device, needs_device, ...)                                                                               \
    int guard_ __attribute__((cleanup(leave), unused)) = enter();                                                      \
    const void *const pointers_[] = {__VA_ARGS__};                                                                     \
    do {                                                                                                               \
        nvml_return admitted_ = admit(__func__, (device), (needs_device));                                             \
        if (admitted_)                                                                                                 \
            return admitted_;                                                                                          \
        for (size_t i_ = 0; i_ < sizeof pointers_ / sizeof *pointers_; i_++)                                           \
            if (!pointers_[i_])                                                                                        \
                return INVALID_ARGUMENT;                                                                               \
    } while (0)
#define ENTER_SYSTEM(...) ENTER(NULL, 0, __VA_ARGS__)
#define ENTER_GPU(device, ...) ENTER(device, 1, __VA_ARGS__)

static nvml_return give_text(int found, const char *text, char *out, unsigned size)
{
    if (found != 1)
        return NOT_SUPPORTED;
    if (strlen(text) + 1 > size)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static nvml_return give_unsigned(const gpu *device, const char *key, unsigned *out)
{
    u64 value;
    nvml_return result = gpu_number(device, key, &value);
    if (result == SUCCESS)
        *out = (unsigned)value;
    return result;
}

/* ---- library ----------------------------------------------------------------------------------------------- */

nvml_return nvmlInitWithFlags(unsigned flags)
{
    char text[LINE];
    int guard __attribute__((cleanup(leave), unused)) = enter();
    const struct timespec pause = {0, 10 * 1000 * 1000};
    (void)flags;
    while (hangs(__func__, NULL))
        nanosleep(&pause, NULL);
    if (state_text("count", text) != 1)
        return DRIVER_NOT_LOADED;
    if (state_text("init", text) == 1 && error_code(text) != SUCCESS)
        return error_code(text);
    for (int i = 0; i < MAX_GPUS; i++)
        gpus[i].index = i;
    initialized++;
    return SUCCESS;
}

nvml_return nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

nvml_return nvmlShutdown(void)
{
    int guard __attribute__((cleanup(leave), unused)) = enter();
    if (!initialized)
        return UNINITIALIZED;
    initialized--;
    return SUCCESS;
}

const char *nvmlErrorString(nvml_return code)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            return errors[i].text;
    return "Unknown Error";
}

nvml_return nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    char text[LINE];
    ENTER_SYSTEM(out);
    return give_text(state_text("driver", text), text, out, size);
}

nvml_return nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
    char text[LINE];
    ENTER_SYSTEM(out);
    return give_text(state_text("nvml", text), text, out, size);
}

/* ---- finding a GPU ----------------------------------------------------------------------------------------- */

static nvml_return gpu_count(unsigned *count)
{
    char text[LINE];
    u64 value;
    if (state_text("count", text) != 1 || parse(text, &value) || value > MAX_GPUS)
        return UNKNOWN;
    *count = (unsigned)value;
    return SUCCESS;
}

nvml_return nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER_SYSTEM(count);
    return gpu_count(count);
}

nvml_return nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu **device)
{
    unsigned count;
    nvml_return result;
    ENTER_SYSTEM(device);
    if ((result = gpu_count(&count)))
        return result;
    if (index >= count)
        return INVALID_ARGUMENT;
    /* As with a real GPU that fell off the bus: it is still counted, and there is no handle to be had. */
    if ((result = admit(__func__, &gpus[index], 1)))
        return result;
    *device = &gpus[index];
    return SUCCESS;
}

nvml_return nvmlDeviceGetHandleByUUID(const char *uuid, gpu **device)
{
    char text[LINE];
    unsigned count;
    nvml_return result;
    ENTER_SYSTEM(uuid, device);
    if ((result = gpu_count(&count)))
        return result;
    for (unsigned i = 0; i < count; i++)
        if (gpu_state(&gpus[i], "uuid", text) == 1 && !strcmp(text, uuid)) {
            *device = &gpus[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

nvml_return nvmlDeviceGetIndex(gpu *device, unsigned *index)
{
    ENTER_GPU(device, index);
    *index = (unsigned)device->index;
    return SUCCESS;
}

/* ---- what a GPU is ----------------------------------------------------------------------------------------- */

#define GPU_TEXT(function, key)                                                                                        \
    nvml_return function(gpu *device, char *out, unsigned size)                                                        \
    {                                                                                                                  \
        char text[LINE];                                                                                               \
        ENTER_GPU(device, out);                                                                                        \
        return give_text(gpu_state(device, key, text), text, out, size);                                               \
    }
GPU_TEXT(nvmlDeviceGetName, "name")
GPU_TEXT(nvmlDeviceGetUUID, "uuid")
GPU_TEXT(nvmlDeviceGetSerial, "serial")

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} pci_info;

nvml_return nvmlDeviceGetPciInfo_v3(gpu *device, pci_info *info)
{
    char text[LINE];
    unsigned function;
    ENTER_GPU(device, info);
    if (gpu_state(device, "pci", text) != 1)
        return NOT_SUPPORTED;
    memset(info, 0, sizeof *info);
    if (sscanf(text, "%x:%x:%x.%x", &info->domain, &info->bus, &info->device, &function) != 4)
        return UNKNOWN;
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.%X", info->domain & 0xffff,
             info->bus & 0xff, info->device & 0xff, function & 0xf);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.%X", info->domain, info->bus & 0xff, info->device & 0xff,
             function & 0xf);
    return SUCCESS;
}

nvml_return nvmlDeviceGetMemoryAffinity(gpu *device, unsigned words, u64 *node_set, unsigned scope)
{
    u64 node;
    nvml_return result;
    ENTER_GPU(device, node_set);
    if (scope > 1)
        return INVALID_ARGUMENT;
    if ((result = gpu_number(device, "numa_node", &node)))
        return result;
    if (node / 64 >= words)
        return INSUFFICIENT_SIZE;
    memset(node_set, 0, words * sizeof *node_set);
    node_set[node / 64] = 1ULL << (node % 64);
    return SUCCESS;
}

/* ---- what a GPU does --------------------------------------------------------------------------------------- */

typedef struct { u64 total, free, used; } memory_v1;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2;
enum { MEMORY_V2 = sizeof(memory_v2) | 2 << 24 };

static nvml_return gpu_memory(const gpu *device, memory_v2 *memory)
{
    nvml_return result;
    memory->reserved = 0;
    if ((result = gpu_number(device, "memory_total", &memory->total)) ||
        (result = gpu_number(device, "memory_used", &memory->used)))
        return result;
    result = gpu_number(device, "memory_reserved", &memory->reserved);
    if (result && result != NOT_SUPPORTED)
        return result;
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

nvml_return nvmlDeviceGetMemoryInfo(gpu *device, memory_v1 *memory)
{
    memory_v2 all;
    nvml_return result;
    ENTER_GPU(device, memory);
    if ((result = gpu_memory(device, &all)))
        return result;
    /* The first version of this call counts what the driver reserves as used. */
    *memory = (memory_v1){all.total, all.free, all.used + all.reserved};
    return SUCCESS;
}

#ifndef WITHOUT_MEMORY_V2
nvml_return nvmlDeviceGetMemoryInfo_v2(gpu *device, memory_v2 *memory)
{
    ENTER_GPU(device, memory);
    if (memory->version != MEMORY_V2)
        return ARGUMENT_VERSION_MISMATCH;
    return gpu_memory(device, memory);
}
#endif

typedef struct { unsigned gpu, memory; } utilization;

nvml_return nvmlDeviceGetUtilizationRates(gpu *device, utilization *rates)
{
    nvml_return result;
    ENTER_GPU(device, rates);
    result = give_unsigned(device, "utilization", &rates->gpu);
    return result ? result : give_unsigned(device, "memory_utilization", &rates->memory);
}

nvml_return nvmlDeviceGetTemperature(gpu *device, unsigned sensor, unsigned *out)
{
    ENTER_GPU(device, out);
    return sensor ? INVALID_ARGUMENT : give_unsigned(device, "temperature", out);
}

#ifndef WITHOUT_TEMPERATURE_V
typedef struct { unsigned version, sensor; int temperature; } temperature_v1;
enum { TEMPERATURE_V1 = sizeof(temperature_v1) | 1 << 24 };

nvml_return nvmlDeviceGetTemperatureV(gpu *device, temperature_v1 *out)
{
    u64 value;
    nvml_return result;
    ENTER_GPU(device, out);
    if (out->version != TEMPERATURE_V1)
        return ARGUMENT_VERSION_MISMATCH;
    if (out->sensor)
        return INVALID_ARGUMENT;
    if ((result = gpu_number(device, "temperature", &value)))
        return result;
    out->temperature = (int)value;
    return SUCCESS;
}
#endif

nvml_return nvmlDeviceGetTotalEnergyConsumption(gpu *device, u64 *out)
{
    ENTER_GPU(device, out);
    return gpu_number(device, "energy", out);
}

nvml_return nvmlDeviceGetClockInfo(gpu *device, unsigned type, unsigned *out)
{
    static const char *const keys[] = {"clock_graphics", "clock_sm", "clock_memory"};
    ENTER_GPU(device, out);
    return type < 3 ? give_unsigned(device, keys[type], out) : INVALID_ARGUMENT;
}

nvml_return nvmlDeviceGetTotalEccErrors(gpu *device, unsigned type, unsigned counter, u64 *out)
{
    ENTER_GPU(device, out);
    if (type > 1 || counter > 1)
        return INVALID_ARGUMENT;
    return gpu_number(device, type ? "ecc_uncorrected" : "ecc_corrected", out);
}

#define GPU_UNSIGNED(function, key)                                                                                    \
    nvml_return function(gpu *device, unsigned *out)                                                                   \
    {                                                                                                                  \
        ENTER_GPU(device, out);                                                                                        \
        return give_unsigned(device, key, out);                                                                        \
    }
GPU_UNSIGNED(nvmlDeviceGetPowerUsage, "power")
GPU_UNSIGNED(nvmlDeviceGetEnforcedPowerLimit, "power_limit")
GPU_UNSIGNED(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation")
GPU_UNSIGNED(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
GPU_UNSIGNED(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_max_generation")
GPU_UNSIGNED(nvmlDeviceGetMaxPcieLinkWidth, "pcie_max_width")

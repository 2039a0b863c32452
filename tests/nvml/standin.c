/* Stands for libnvidia-ml.so.1: plays a script instead of asking a driver. standin.py describes the script's lines.
 *
 * Only what pynvml and torch call is here, with NVML's own layouts (nvml.h of CUDA 12). STANDIN_AGE leaves symbols
 * out as old drivers do: 1 has version 2 of the process lists and version 1 of the memory, 2 has neither list nor MIG.
 */
#include <pthread.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef STANDIN_AGE
#define STANDIN_AGE 0
#endif

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, ARGUMENT_VERSION_MISMATCH = 25 };
enum { MAX_DEVICES = 32, MAX_STATES = 16, MAX_PROCESSES = 64, MAX_RULES = 64, TEXT = 512 };

typedef unsigned long long bytes_t;
typedef struct { bytes_t total, free, used; } memory_v1_t;
typedef struct { unsigned version; bytes_t total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; bytes_t used; unsigned gpu_instance, compute_instance; } process_t;

typedef struct { process_t process; char kind; } listed_t; /* kind: c(ompute), g(raphics), m(ps) */
typedef struct { long from_read; bytes_t total, used, reserved; int num_listed; listed_t listed[MAX_PROCESSES]; } state_t;
typedef struct device {
    char uuid[TEXT], name[TEXT];
    int parent;                    /* place of the card that a MIG instance belongs to, -1 for a card */
    int mig_mode;                  /* 0 off, 1 on, -1 not supported */
    unsigned gpu_instance, compute_instance, slot;
    long num_reads;
    int num_states;
    state_t states[MAX_STATES];
} device_t;
typedef struct { char function[TEXT], uuid[TEXT]; int code; long after, seen; } rule_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static device_t devices[MAX_DEVICES];
static rule_t rules[MAX_RULES];
static int num_devices, num_rules, num_open;
static int wide; /* as the first drivers of series 535: version 3 of the lists has entries that are 8 bytes longer */
static char driver_version[TEXT], nvml_version[TEXT];
static int cuda_version;

/* ---- the script ---- */

static bytes_t amount(const char *text) { return strcmp(text, "n/a") ? strtoull(text, NULL, 10) : ~0ULL; }

static device_t *new_device(int parent) {
    device_t *device = &devices[num_devices++];
    memset(device, 0, sizeof *device);
    device->parent = parent;
    device->mig_mode = -1;
    device->gpu_instance = device->compute_instance = ~0U;
    device->num_states = 1;
    return device;
}

static void read_process(device_t *device, const char *rest) {
    state_t *state = &device->states[device->num_states - 1];
    listed_t *listed = &state->listed[state->num_listed++];
    char pid[TEXT] = "", used[TEXT] = "", kind[TEXT] = "compute";
    listed->process.gpu_instance = device->gpu_instance;
    listed->process.compute_instance = device->compute_instance;
    sscanf(rest, "%511s %511s %511s %u %u", pid, used, kind, &listed->process.gpu_instance,
           &listed->process.compute_instance);
    listed->process.pid = strcmp(pid, "self") ? (unsigned)strtoul(pid, NULL, 10) : (unsigned)getpid();
    listed->process.used = amount(used);
    listed->kind = kind[0];
}

static void read_line(char *line) {
    char word[TEXT] = "", a[TEXT] = "", b[TEXT] = "0", c[TEXT] = "0";
    int taken = 0, card = num_devices - 1;
    device_t *device = num_devices ? &devices[num_devices - 1] : NULL;
    line[strcspn(line, "\n")] = 0;
    if (sscanf(line, " %511s%n", word, &taken) < 1 || word[0] == '#') return;
    char *rest = line + taken + strspn(line + taken, " ");
    if (!strcmp(word, "driver")) snprintf(driver_version, TEXT, "%s", rest);
    else if (!strcmp(word, "nvml")) snprintf(nvml_version, TEXT, "%s", rest);
    else if (!strcmp(word, "cuda")) cuda_version = atoi(rest);
    else if (!strcmp(word, "wide")) wide = 1;
    else if (!strcmp(word, "card")) {
        device = new_device(-1);
        sscanf(rest, "%511s%n", device->uuid, &taken);
        snprintf(device->name, TEXT, "%s", rest + taken + strspn(rest + taken, " "));
    } else if (!strcmp(word, "instance")) {
        while (devices[card].parent >= 0) card--;
        device = new_device(card);
        snprintf(device->name, TEXT, "%s", devices[card].name);
        sscanf(rest, "%511s %u %u %u", device->uuid, &device->gpu_instance, &device->compute_instance, &device->slot);
    } else if (!strcmp(word, "mig")) device->mig_mode = !strcmp(rest, "on");
    else if (!strcmp(word, "memory")) {
        sscanf(rest, "%511s %511s %511s", a, b, c);
        state_t *state = &device->states[device->num_states - 1];
        state->total = amount(a), state->used = amount(b), state->reserved = amount(c);
    } else if (!strcmp(word, "process")) read_process(device, rest);
    else if (!strcmp(word, "then")) {
        state_t *state = &device->states[device->num_states++];
        *state = state[-1];
        state->from_read = atol(rest), state->num_listed = 0;
    } else if (!strcmp(word, "fail")) {
        rule_t *rule = &rules[num_rules++];
        memset(rule, 0, sizeof *rule);
        sscanf(rest, "%511s %d%n", rule->function, &rule->code, &taken);
        for (char *option = strtok(rest + taken, " "); option; option = strtok(NULL, " ")) {
            char *value = strtok(NULL, " ");
            if (!strcmp(option, "after")) rule->after = atol(value);
            else snprintf(rule->uuid, TEXT, "%s", value); /* on */
        }
    } else { fprintf(stderr, "stand-in driver: unknown line: %s\n", line); abort(); }
}

static int read_script(void) {
    const char *path = getenv("NVML_STANDIN_SCRIPT");
    FILE *file = path ? fopen(path, "rb") : NULL;
    char line[4 * TEXT];
    num_devices = num_rules = wide = 0;
    strcpy(driver_version, "570.86.15"), strcpy(nvml_version, "12.570.86.15"), cuda_version = 12080;
    if (!file) return DRIVER_NOT_LOADED;
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
    return OK;
}

static void note(const char *what, int code) {
    const char *path = getenv("NVML_STANDIN_LOG");
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    char line[TEXT];
    if (file < 0) return;
    int length = snprintf(line, TEXT, "%d %s %d\n", (int)getpid(), what, code);
    if (write(file, line, length) < 0) perror("stand-in driver");
    close(file);
}

/* ---- what every function does first: is the driver open, does the script let it fail ---- */

static int names(const rule_t *rule, const char *function) {
    size_t length = strlen(rule->function);
    if (!strcmp(rule->function, "*")) return 1;
    return !strncmp(rule->function, function, length) && (!function[length] || !strncmp(function + length, "_v", 2));
}

static int scripted(const char *function, const device_t *device) {
    for (rule_t *rule = rules; rule < rules + num_rules; rule++) {
        if (!names(rule, function) || (rule->uuid[0] && (!device || strcmp(rule->uuid, device->uuid)))) continue;
        if (rule->seen++ >= rule->after) return rule->code;
    }
    return OK;
}

/* The same for a function that finds a device: the rules for that one, which could not be told before. */
static int scripted_on(const char *function, const device_t *device) {
    for (rule_t *rule = rules; rule < rules + num_rules; rule++)
        if (rule->uuid[0] && names(rule, function) && !strcmp(rule->uuid, device->uuid) && rule->seen++ >= rule->after)
            return rule->code;
    return OK;
}

static int enter(const char *function, const device_t *device) {
    pthread_mutex_lock(&lock);
    if (!num_open) return UNINITIALIZED;
    if (device && (device < devices || device >= devices + num_devices)) return INVALID_ARGUMENT;
    return scripted(function, device);
}

static int leave(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

#define BEGIN(device) int code = enter(__func__, device); if (code) return leave(code)

/* ---- opening and closing ---- */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    int code = num_open ? OK : read_script();
    for (rule_t *rule = rules; !code && rule < rules + num_rules; rule++)
        if (!strcmp(rule->function, "nvmlInit") && rule->seen++ >= rule->after) code = rule->code;
    if (!code) num_open++;
    note("init", code);
    return leave(code);
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    int code = UNINITIALIZED;
    if (num_open) code = OK;
    for (rule_t *rule = rules; !code && rule < rules + num_rules; rule++)
        if (!strcmp(rule->function, "nvmlShutdown")) code = rule->code;
    if (num_open) num_open--;
    note("shutdown", code);
    return leave(code);
}

/* ---- versions ---- */

static int copy(const char *text, char *into, unsigned length) {
    if (strlen(text) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(into, text);
    return OK;
}

int nvmlSystemGetDriverVersion(char *into, unsigned length) { BEGIN(NULL); return leave(copy(driver_version, into, length)); }
int nvmlSystemGetNVMLVersion(char *into, unsigned length) { BEGIN(NULL); return leave(copy(nvml_version, into, length)); }
int nvmlSystemGetCudaDriverVersion(int *version) { BEGIN(NULL); *version = cuda_version; return leave(OK); }
#if STANDIN_AGE < 1
int nvmlSystemGetCudaDriverVersion_v2(int *version) { BEGIN(NULL); *version = cuda_version; return leave(OK); }
#endif
const char *nvmlErrorString(int code) { (void)code; return "an error of the stand-in"; }

/* ---- cards ---- */

int nvmlDeviceGetCount_v2(unsigned *count) {
    BEGIN(NULL);
    *count = 0;
    for (int place = 0; place < num_devices; place++) *count += devices[place].parent < 0;
    return leave(OK);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **handle) {
    BEGIN(NULL);
    for (int place = 0; place < num_devices; place++)
        if (devices[place].parent < 0 && !index--) {
            *handle = &devices[place];
            return leave(scripted_on(__func__, *handle));
        }
    return leave(INVALID_ARGUMENT);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **handle) {
    BEGIN(NULL);
    for (int place = 0; place < num_devices; place++)
        if (!strcmp(devices[place].uuid, uuid)) {
            *handle = &devices[place];
            return leave(scripted_on(__func__, *handle));
        }
    return leave(NOT_FOUND);
}

int nvmlDeviceGetUUID(device_t *device, char *into, unsigned length) { BEGIN(device); return leave(copy(device->uuid, into, length)); }
int nvmlDeviceGetName(device_t *device, char *into, unsigned length) { BEGIN(device); return leave(copy(device->name, into, length)); }

int nvmlDeviceGetIndex(device_t *device, unsigned *index) {
    BEGIN(device);
    *index = 0;
    for (device_t *other = devices; other < device; other++) *index += other->parent < 0;
    return leave(OK);
}

#if STANDIN_AGE < 2
int nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending) {
    BEGIN(device);
    *current = *pending = device->mig_mode == 1;
    return leave(device->mig_mode < 0 ? NOT_SUPPORTED : OK);
}
int nvmlDeviceGetMaxMigDeviceCount(device_t *device, unsigned *count) {
    BEGIN(device);
    *count = device->mig_mode < 0 ? 0 : 7;
    return leave(OK);
}
int nvmlDeviceGetMigDeviceHandleByIndex(device_t *device, unsigned index, device_t **handle) {
    BEGIN(device);
    for (int place = 0; place < num_devices; place++)
        if (devices[place].parent == device - devices && devices[place].slot == index) {
            *handle = &devices[place];
            return leave(OK);
        }
    return leave(NOT_FOUND);
}
int nvmlDeviceIsMigDeviceHandle(device_t *device, unsigned *is_instance) {
    BEGIN(device);
    *is_instance = device->parent >= 0;
    return leave(OK);
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t *device, device_t **handle) {
    BEGIN(device);
    if (device->parent < 0) return leave(INVALID_ARGUMENT);
    *handle = &devices[device->parent];
    return leave(OK);
}
int nvmlDeviceGetGpuInstanceId(device_t *device, unsigned *id) {
    BEGIN(device);
    *id = device->gpu_instance;
    return leave(device->parent < 0 ? NOT_SUPPORTED : OK);
}
int nvmlDeviceGetComputeInstanceId(device_t *device, unsigned *id) {
    BEGIN(device);
    *id = device->compute_instance;
    return leave(device->parent < 0 ? NOT_SUPPORTED : OK);
}
#endif

/* ---- memory and processes: a reading of the memory moves the script on ---- */

static const state_t *now(const device_t *device) {
    int place = device->num_states - 1;
    while (place && device->states[place].from_read >= device->num_reads) place--;
    return &device->states[place];
}

int nvmlDeviceGetMemoryInfo(device_t *device, memory_v1_t *memory) {
    BEGIN(device);
    device->num_reads++;
    const state_t *state = now(device);
    bytes_t used = state->used == ~0ULL ? ~0ULL : state->used + state->reserved; /* version 1 counts both as used */
    *memory = (memory_v1_t){state->total, state->total - used, used};
    return leave(OK);
}

#if STANDIN_AGE < 1
int nvmlDeviceGetMemoryInfo_v2(device_t *device, memory_v2_t *memory) {
    BEGIN(device);
    if (memory->version != (sizeof *memory | 2 << 24)) return leave(ARGUMENT_VERSION_MISMATCH);
    device->num_reads++;
    const state_t *state = now(device);
    memory->total = state->total, memory->used = state->used, memory->reserved = state->reserved;
    memory->free = state->total - state->used - state->reserved;
    return leave(OK);
}
#endif

#if STANDIN_AGE < 2
static int list(const device_t *device, char kind, size_t stride, unsigned *count, process_t *into) {
    const state_t *state = now(device);
    unsigned needed = 0, room = *count;
    for (int place = 0; place < state->num_listed; place++)
        if (state->listed[place].kind == kind) {
            if (needed < room && into) memcpy((char *)into + needed * stride, &state->listed[place].process, sizeof *into);
            needed++;
        }
    *count = needed;
    return needed > room ? INSUFFICIENT_SIZE : OK;
}
#endif

#define LIST(function, kind, extra) \
    int function(device_t *device, unsigned *count, process_t *into) { \
        BEGIN(device); \
        return leave(list(device, kind, sizeof *into + (extra), count, into)); \
    }

#if STANDIN_AGE < 1
LIST(nvmlDeviceGetComputeRunningProcesses_v3, 'c', wide ? 8 : 0)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, 'g', wide ? 8 : 0)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, 'm', wide ? 8 : 0)
#endif
#if STANDIN_AGE < 2
LIST(nvmlDeviceGetComputeRunningProcesses_v2, 'c', 0)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, 'g', 0)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, 'm', 0)
#endif

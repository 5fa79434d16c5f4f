/* A stand-in for libnvidia-ml.so.1 that tests script: the ABI of nvml.h 13, and no GPU.
 *
 * Devices 0..3 are GPUs, of which the first `gpus` are listed. Devices 4..7 are MIG slices of
 * device 0, of which the first `mig` (a value of device 0) are in use, at every second index.
 * Every value of a device is a number under a key; what was not set is not supported.
 *
 * With OLD_DRIVER some newer symbols are missing, as in the drivers of some years ago.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef int Return;
typedef unsigned long long u64;

enum {
  SUCCESS = 0,
  UNINITIALIZED = 1,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7,
  ARGUMENT_VERSION_MISMATCH = 25,
};

enum { NUM_GPUS = 4, NUM_DEVICES = 8, MAX_VALUES = 64, MAX_FUNCTIONS = 64, MAX_PROCESSES = 8 };

typedef struct {
  unsigned pid;
  u64 used;
  unsigned gpu_instance, compute_instance;
} Process;

typedef struct Device {
  int number;
  char uuid[96];
  int num_values, num_processes;
  struct { char key[48]; u64 value; } values[MAX_VALUES];
  Process processes[MAX_PROCESSES];
} Device;

typedef struct {
  char name[64];
  Return code;    /* what to fail with */
  long after;     /* calls that succeed before */
  long times;     /* calls that fail then; -1 for all */
  unsigned sleep_us;
  unsigned long calls;
} Function;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Device devices[NUM_DEVICES];
static Function functions[MAX_FUNCTIONS];
static int num_functions, num_listed = 1, num_users;

/* What tests call. */

static Function *function(const char *name) {
  for (int i = 0; i < num_functions; i++)
    if (!strcmp(functions[i].name, name)) return &functions[i];
  Function *f = &functions[num_functions < MAX_FUNCTIONS ? num_functions++ : 0];
  memset(f, 0, sizeof *f);
  snprintf(f->name, sizeof f->name, "%s", name);
  return f;
}

void stub_reset(void) {
  pthread_mutex_lock(&lock);
  memset(devices, 0, sizeof devices);
  memset(functions, 0, sizeof functions);
  num_functions = num_users = 0;
  num_listed = 1;
  for (int i = 0; i < NUM_DEVICES; i++) {
    devices[i].number = i;
    snprintf(devices[i].uuid, sizeof devices[i].uuid, "%s-%08d-0000-4000-8000-000000000000",
             i < NUM_GPUS ? "GPU" : "MIG", i);
  }
  pthread_mutex_unlock(&lock);
}

void stub_set(int device, const char *key, u64 value) {
  pthread_mutex_lock(&lock);
  Device *d = &devices[device];
  int i = 0;
  while (i < d->num_values && strcmp(d->values[i].key, key)) i++;
  if (i == d->num_values) snprintf(d->values[d->num_values++].key, 48, "%s", key);
  d->values[i].value = value;
  pthread_mutex_unlock(&lock);
}

void stub_unset(int device, const char *key) {
  pthread_mutex_lock(&lock);
  Device *d = &devices[device];
  for (int i = 0; i < d->num_values; i++)
    if (!strcmp(d->values[i].key, key)) d->values[i] = d->values[--d->num_values];
  pthread_mutex_unlock(&lock);
}

void stub_gpus(int n) { num_listed = n; }
void stub_uuid(int device, const char *uuid) { snprintf(devices[device].uuid, 96, "%s", uuid); }
int stub_users(void) { return num_users; }

void stub_process(int device, unsigned pid, u64 used) {
  Device *d = &devices[device];
  d->processes[d->num_processes++] = (Process){pid, used, ~0u, ~0u};
}

void stub_fail(const char *name, int code, long after, long times) {
  pthread_mutex_lock(&lock);
  Function *f = function(name);
  f->code = code;
  f->after = after;
  f->times = times;
  pthread_mutex_unlock(&lock);
}

void stub_sleep(const char *name, unsigned us) { function(name)->sleep_us = us; }
unsigned long stub_calls(const char *name) { return function(name)->calls; }

/* What every entry point begins with. */

static Return enter(const char *name, int needs_init) {
  pthread_mutex_lock(&lock);
  Function *f = function(name);
  f->calls++;
  Return code = needs_init && num_users <= 0 ? UNINITIALIZED : SUCCESS;
  if (f->code && f->after > 0) {
    f->after--;
  } else if (f->code && f->times != 0) {
    if (f->times > 0) f->times--;
    code = f->code;
  }
  unsigned us = f->sleep_us;
  pthread_mutex_unlock(&lock);
  if (us) usleep(us);
  return code;
}

#define ENTER do { Return code_ = enter(__func__, 1); if (code_) return code_; } while (0)

static int get(Device *d, const char *key, u64 *value) {
  int found = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < d->num_values; i++)
    if (!strcmp(d->values[i].key, key)) { *value = d->values[i].value; found = 1; }
  pthread_mutex_unlock(&lock);
  return found;
}

static Return get_uint(Device *d, const char *key, unsigned *out) {
  u64 value;
  if (!get(d, key, &value)) return NOT_SUPPORTED;
  *out = (unsigned)value;
  return SUCCESS;
}

/* NVML itself. */

Return nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  Return code = enter(__func__, 0);
  if (!code) num_users++;
  return code;
}
Return nvmlShutdown(void) { ENTER; num_users--; return SUCCESS; }
const char *nvmlErrorString(Return code) { (void)code; return "an error of the stub"; }
Return nvmlSystemGetDriverVersion(char *out, unsigned n) { ENTER; snprintf(out, n, "580.65.06"); return SUCCESS; }
Return nvmlSystemGetCudaDriverVersion_v2(int *out) { ENTER; *out = 13010; return SUCCESS; }
Return nvmlDeviceGetCount_v2(unsigned *n) { ENTER; *n = num_listed; return SUCCESS; }
Return nvmlDeviceGetHandleByIndex_v2(unsigned i, Device **d) {
  ENTER;
  if ((int)i >= num_listed) return INVALID_ARGUMENT;
  *d = &devices[i];
  return SUCCESS;
}
Return nvmlDeviceGetUUID(Device *d, char *out, unsigned n) { ENTER; snprintf(out, n, "%s", d->uuid); return SUCCESS; }
Return nvmlDeviceGetName(Device *d, char *out, unsigned n) { ENTER; (void)d; snprintf(out, n, "Stub GPU"); return SUCCESS; }
Return nvmlDeviceGetPersistenceMode(Device *d, unsigned *on) { ENTER; return get_uint(d, "persistence", on); }
Return nvmlDeviceGetEnforcedPowerLimit(Device *d, unsigned *mw) { ENTER; return get_uint(d, "power_limit", mw); }
Return nvmlDeviceGetMaxClockInfo(Device *d, unsigned type, unsigned *mhz) {
  ENTER;
  return get_uint(d, type == 2 ? "max_memory_clock" : "max_sm_clock", mhz);
}

Return nvmlDeviceGetMigMode(Device *d, unsigned *now, unsigned *pending) {
  ENTER;
  u64 slices;
  if (!get(d, "mig", &slices)) return NOT_SUPPORTED;
  *now = *pending = slices > 0;
  return SUCCESS;
}
Return nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *n) { ENTER; (void)d; *n = 7; return SUCCESS; }
Return nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned i, Device **out) {
  ENTER;
  u64 slices = 0;
  get(d, "mig", &slices);
  if (i % 2 || i / 2 >= slices) return NOT_FOUND;
  *out = &devices[NUM_GPUS + i / 2];
  return SUCCESS;
}

/* Memory: "used" is what programs hold; the older call counts the driver's reserve into it. */
typedef struct { u64 total, free, used; } MemoryV1;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;

Return nvmlDeviceGetMemoryInfo(Device *d, MemoryV1 *m) {
  ENTER;
  u64 total, used, reserved;
  if (!get(d, "total", &total) || !get(d, "used", &used) || !get(d, "reserved", &reserved))
    return NOT_SUPPORTED;
  *m = (MemoryV1){total, total - used - reserved, used + reserved};
  return SUCCESS;
}
#ifndef OLD_DRIVER
Return nvmlDeviceGetMemoryInfo_v2(Device *d, MemoryV2 *m) {
  ENTER;
  if (m->version != (sizeof *m | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
  u64 total, used, reserved;
  if (!get(d, "total", &total) || !get(d, "used", &used) || !get(d, "reserved", &reserved))
    return NOT_SUPPORTED;
  *m = (MemoryV2){m->version, total, reserved, total - used - reserved, used};
  return SUCCESS;
}
#endif

typedef struct { unsigned gpu, memory; } Utilization;
Return nvmlDeviceGetUtilizationRates(Device *d, Utilization *u) {
  ENTER;
  Return code = get_uint(d, "gpu_utilization", &u->gpu);
  return code ? code : get_uint(d, "memory_utilization", &u->memory);
}
Return nvmlDeviceGetPowerUsage(Device *d, unsigned *mw) { ENTER; return get_uint(d, "power", mw); }
Return nvmlDeviceGetTotalEnergyConsumption(Device *d, u64 *mj) { ENTER; return get(d, "energy", mj) ? SUCCESS : NOT_SUPPORTED; }
Return nvmlDeviceGetClockInfo(Device *d, unsigned type, unsigned *mhz) {
  ENTER;
  return get_uint(d, type == 2 ? "memory_clock" : "sm_clock", mhz);
}
Return nvmlDeviceGetTemperature(Device *d, unsigned sensor, unsigned *c) {
  ENTER;
  return sensor ? INVALID_ARGUMENT : get_uint(d, "temperature", c);
}
#ifndef OLD_DRIVER
typedef struct { unsigned version, sensor; int c; } TemperatureV1;
Return nvmlDeviceGetTemperatureV(Device *d, TemperatureV1 *t) {
  ENTER;
  if (t->version != (sizeof *t | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
  return get_uint(d, "temperature", (unsigned *)&t->c);
}
Return nvmlDeviceGetCurrentClocksEventReasons(Device *d, u64 *bits) { ENTER; return get(d, "reasons", bits) ? SUCCESS : NOT_SUPPORTED; }
#endif
Return nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, u64 *bits) { ENTER; return get(d, "reasons", bits) ? SUCCESS : NOT_SUPPORTED; }
Return nvmlDeviceGetMemoryErrorCounter(Device *d, unsigned kind, unsigned counter, unsigned where, u64 *n) {
  ENTER;
  if (counter != 0 || where != 2) return INVALID_ARGUMENT;
  return get(d, kind ? "ecc_uncorrected" : "ecc_corrected", n) ? SUCCESS : NOT_SUPPORTED;
}
Return nvmlDeviceGetRemappedRows(Device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  ENTER;
  *pending = *failed = 1; /* flags: not to be counted */
  Return code = get_uint(d, "remapped_corrected", corrected);
  return code ? code : get_uint(d, "remapped_uncorrected", uncorrected);
}

#ifdef OLD_DRIVER
#define nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetComputeRunningProcesses_v2
#endif
Return nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *n, Process *out) {
  ENTER;
  unsigned room = *n;
  *n = d->num_processes;
  if (!d->num_processes) return SUCCESS;
  if (!out || room < *n) return INSUFFICIENT_SIZE;
  memcpy(out, d->processes, *n * sizeof *out);
  return SUCCESS;
}

/* Fields: "field.N" is the value of field N (8 bytes wide, or 4 with "field.N.uint"),
 * "field.N.error" its code; "field.N.scope1" the value under scope 1. */
typedef struct {
  uint32_t id, scope;
  int64_t timestamp, latency;
  unsigned type;
  Return code;
  union { unsigned ui; u64 ull; } value;
} Field;

Return nvmlDeviceGetFieldValues(Device *d, int n, Field *fields) {
  ENTER;
  for (int i = 0; i < n; i++) {
    Field *f = &fields[i];
    char key[48];
    u64 value = 0, code = NOT_SUPPORTED;
    snprintf(key, sizeof key, f->scope ? "field.%u.scope%u" : "field.%u", f->id, f->scope);
    if (get(d, key, &value)) code = SUCCESS;
    snprintf(key, sizeof key, "field.%u.error", f->id);
    get(d, key, &code);
    f->code = (Return)code;
    snprintf(key, sizeof key, "field.%u.uint", f->id);
    u64 is_uint;
    if (get(d, key, &is_uint)) {
      memset(&f->value, 0xff, sizeof f->value); /* the upper half is garbage */
      f->type = 1;
      f->value.ui = (unsigned)value;
    } else {
      f->type = 3;
      f->value.ull = value;
    }
  }
  return SUCCESS;
}

__attribute__((constructor)) static void begin(void) { stub_reset(); }

// Stands for libcuda.so.1: writes down what it is asked, and answers as it is told.
#include <cstdint>

static int lookups = 0, launches = 0, lookup_error = 0, launch_error = 0;
static uint64_t seen[11];
static thread_local void* context = nullptr;

extern "C" {

void tell(int lookup, int launch) { lookup_error = lookup, launch_error = launch; }
void enter(void* made) { context = made; }
int count_lookups() { return lookups; }
int count_launches() { return launches; }
uint64_t launched_with(int index) { return seen[index]; }

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuCtxGetId(void* of, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(of == nullptr ? context : of);
  return *id == 0 ? 201 : 0;
}

int cuCtxGetDevice(int* device) {
  *device = static_cast<int>(reinterpret_cast<uintptr_t>(context) / 1000);
  return context == nullptr ? 201 : 0;
}

// A function is the sum of its context and its kernel.
int cuKernelGetFunction(void** function, void* kernel) {
  ++lookups;
  *function = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(kernel) + reinterpret_cast<uintptr_t>(context));
  return lookup_error;
}

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                   unsigned shared_bytes, void* stream, void** arguments, void** extra) {
  ++launches;
  const uint64_t given[] = {reinterpret_cast<uintptr_t>(function), grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,
                            reinterpret_cast<uintptr_t>(stream), reinterpret_cast<uintptr_t>(arguments), reinterpret_cast<uintptr_t>(extra)};
  for (int i = 0; i < 11; ++i) seen[i] = given[i];
  return launch_error;
}
}

// Stands before CuTe DSL's runtime library (LD_PRELOAD), or behind fa4_launch.cc alone: counts what is left to the CUDA runtime.
static int launches = 0, devices = 0;

extern "C" {

int runtime_launches() { return launches; }
int runtime_devices() { return devices; }

int __real__cudaLaunchKernelEx(const void*, void*, void**) {
  ++launches;
  return 0;
}

int __real__cudaGetDevice(int* device) {
  ++devices;
  *device = 0;
  return 0;
}

int _cudaLaunchKernelEx(const void* config, void* kernel, void** arguments) { return __real__cudaLaunchKernelEx(config, kernel, arguments); }
int _cudaGetDevice(int* device) { return __real__cudaGetDevice(device); }
int _cudaSetDevice(int) { return 0; }
int cuda_dialect_init_library_once(void*, void*, void*, void*) { return 0; }
}

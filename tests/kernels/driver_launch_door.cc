// driver_launch.h for ctypes: a launch is -1 where the runtime would have to do it.
#include "driver_launch.h"

extern "C" {

int device() { return mla::current_device(); }

int launch(void* kernel, const unsigned* sizes, void* stream, void** arguments) {
  const mla::LaunchShape shape{{sizes[0], sizes[1], sizes[2]}, {sizes[3], sizes[4], sizes[5]}, sizes[6], stream};
  return mla::launch_by_driver(kernel, shape, arguments).value_or(-1);
}
}

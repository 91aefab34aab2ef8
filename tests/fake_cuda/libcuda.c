/* A CUDA driver without a device: it notes the last launch, byte for byte. */
#include <stdio.h>
#include <string.h>

#include "cuda.h"

#define MOST 256

static char noted[1 << 16];
static int count;
static int sizes[MOST];

/* Bytes of each parameter of the launches that come: a driver knows them from the kernel. */
void fake_expect(int number, const int *bytes) {
  count = number;
  memcpy(sizes, bytes, number * sizeof(int));
}

const char *fake_noted(void) { return noted; }

void fake_forget(void) { noted[0] = 0; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function,
                          void **params, void **extra) {
  char *end = noted;
  end += sprintf(end, "%u,%u,%u blocks of %u,%u,%u, %u bytes, stream %p, %p;",
                 config->gridDimX, config->gridDimY, config->gridDimZ,
                 config->blockDimX, config->blockDimY, config->blockDimZ,
                 config->sharedMemBytes, (void *)config->hStream, (void *)function);
  for (unsigned i = 0; i < config->numAttrs; i++)
    end += sprintf(end, " attribute %d = %d", (int)config->attrs[i].id,
                   (int)config->attrs[i].value.programmaticStreamSerializationAllowed);
  for (int i = 0; i < count; i++) {
    unsigned long long value = 0;
    memcpy(&value, params[i], sizes[i]);
    end += sprintf(end, " %llx", value);
  }
  return CUDA_SUCCESS;
}

/* As torch's launcher calls it. */
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz,
                        unsigned bx, unsigned by, unsigned bz, unsigned shared,
                        CUstream stream, void **params, void **extra) {
  CUlaunchConfig config = {gx, gy, gz, bx, by, bz, shared, stream, NULL, 0};
  return cuLaunchKernelEx(&config, function, params, extra);
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute which, CUdeviceptr at) {
  *(CUdeviceptr *)data = at;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "none";
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction of) {
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction of, CUfunction_attribute which, int value) {
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction of, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return CUDA_SUCCESS;
}

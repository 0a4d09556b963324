/* Executes a plan on a GPU without Python: the C half of interop/words.py, called by XLA's FFI or through ctypes.

   A plan arrives as 64-bit words (layout: interop/words.py). For each launch the parameter bytes are copied, the
   addresses of the operands are written into them, tensor maps are encoded, and the kernel is queued on the caller's
   stream. Kernels are named by a hash of their source: addresses of one process never enter a program that another
   process may run. No CUDA headers and no XLA headers: the few types needed are spelled out here, and
   tests/interop/test_launcher.py compares them with the installed headers. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* ---- what is needed of the CUDA driver ------------------------------------------------------------------------ */

typedef struct {
  int32_t id;
  char pad[4];
  union { unsigned cluster[3]; int overlap; char bytes[64]; } value;
} LaunchAttribute;

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream;
  LaunchAttribute *attributes;
  unsigned num_attributes;
} LaunchConfig;

enum { kAttributeCluster = 4, kAttributeOverlap = 6 };  /* CU_LAUNCH_ATTRIBUTE_* */

typedef int LaunchKernel(const LaunchConfig *, void *function, void **params, void **extra);
typedef int CurrentDevice(int *device);
typedef int EncodeTiled(void *map, int dtype, uint32_t rank, void *address, const uint64_t *dims,
                        const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides, int interleave,
                        int swizzle, int l2_promotion, int out_of_bounds);

typedef int MemsetD32(void *address, unsigned value, size_t count, void *stream);

typedef int IsCapturing(void *stream, int *status);
typedef int CurrentContext(void **context);
typedef int RetainContext(void **context, int device);
typedef int SetContext(void *context);

static LaunchKernel *launch_kernel;
static CurrentContext *current_context;
static RetainContext *retain_context;
static SetContext *set_context;
static MemsetD32 *memset_words;
static IsCapturing *is_capturing;
static CurrentDevice *current_device;
static EncodeTiled *encode_tiled;

/* Replaces the driver: the tests put the CPU emulator here. */
void cuflash_set_driver(LaunchKernel *launch, CurrentDevice *device, EncodeTiled *encode, MemsetD32 *memset,
                        IsCapturing *capturing) {
  launch_kernel = launch;
  memset_words = memset;
  is_capturing = capturing;
  current_device = device;
  encode_tiled = encode;
  current_context = NULL;
}

/* 0 when the driver's entry points are known; two threads that race here write the same values. */
static int load_driver(void) {
  if (launch_kernel) return 0;
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver) return 1;
  current_device = (CurrentDevice *)dlsym(driver, "cuCtxGetDevice");
  retain_context = (RetainContext *)dlsym(driver, "cuDevicePrimaryCtxRetain");
  set_context = (SetContext *)dlsym(driver, "cuCtxSetCurrent");
  current_context = retain_context && set_context ? (CurrentContext *)dlsym(driver, "cuCtxGetCurrent") : NULL;
  memset_words = (MemsetD32 *)dlsym(driver, "cuMemsetD32Async");
  is_capturing = (IsCapturing *)dlsym(driver, "cuStreamIsCapturing");
  encode_tiled = (EncodeTiled *)dlsym(driver, "cuTensorMapEncodeTiled"); /* absent before CUDA 12: used on sm_90 only */
  LaunchKernel *launch = (LaunchKernel *)dlsym(driver, "cuLaunchKernelEx");
  if (!launch || !current_device || !memset_words) return 1;
  __atomic_store_n(&launch_kernel, launch, __ATOMIC_RELEASE);
  return 0;
}

/* A thread that has made no call of the CUDA runtime has no context, and memory from a pool needs none. The primary
   context of the device is the one that CuPy, torch and JAX share. */
static int ensure_context(int device) {
  void *context = NULL;
  if (!current_context || (current_context(&context) == 0 && context)) return 0;
  int rc = retain_context(&context, device);
  return rc ? rc : set_context(context);
}

/* A graph gets plain edges: whoever owns it (XLA, say) may copy or update it, and knows of no other kind. */
static int is_captured(void *stream) {
  int status = 0;
  return is_capturing && (is_capturing(stream, &status) || status);
}

/* ---- kernels by content hash and device ----------------------------------------------------------------------- */

enum { kTableSize = 8192 }; /* power of two; open addressing, nothing is ever removed */
typedef struct { uint64_t key; int64_t device_plus_1; void *function; } Entry;
static Entry table[kTableSize];

static unsigned slot_of(uint64_t key, int device) {
  return (unsigned)((key ^ (uint64_t)(device + 1) * 0x9E3779B97F4A7C15ull) >> 17) & (kTableSize - 1);
}

/* Called under Python's lock, so there is one writer; readers see an entry only when it is whole. 0, or 1 when full. */
int cuflash_register(uint64_t key, int device, void *function) {
  for (unsigned i = slot_of(key, device), n = 0; n < kTableSize; ++n, i = (i + 1) & (kTableSize - 1)) {
    Entry *entry = &table[i];
    int64_t owner = __atomic_load_n(&entry->device_plus_1, __ATOMIC_RELAXED);
    if (owner && !(owner == device + 1 && entry->key == key)) continue;
    entry->key = key;
    __atomic_store_n(&entry->function, function, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->device_plus_1, device + 1, __ATOMIC_RELEASE);
    return 0;
  }
  return 1;
}

static void *find_kernel(uint64_t key, int device) {
  for (unsigned i = slot_of(key, device), n = 0; n < kTableSize; ++n, i = (i + 1) & (kTableSize - 1)) {
    int64_t owner = __atomic_load_n(&table[i].device_plus_1, __ATOMIC_ACQUIRE);
    if (!owner) return NULL;
    if (owner == device + 1 && table[i].key == key) return __atomic_load_n(&table[i].function, __ATOMIC_RELAXED);
  }
  return NULL;
}

/* ---- the plan ------------------------------------------------------------------------------------------------- */

enum {
  kVersion = 2,
  kMaxParams = 4096,    /* bytes; the classic limit on kernel parameters */
  kHeaderWords = 4,     /* version, operands, launches, 32-bit words of the workspace to clear */
  kLaunchWords = 9,     /* key, grid, block, shared, cluster, overlap, param bytes, pointers, tensor maps */
  kPointerWords = 3,    /* offset, operand, byte offset */
  kMapWords = 22,       /* offset, operand, byte offset, dtype, rank, swizzle, L2 promotion, dims[5], strides[5],
                           box[5] */
  kMapBytes = 128,
};

enum { kOk = 0, kInvalid = 3, kMissing = 9, kInternal = 13 }; /* the codes of absl, as XLA numbers them */

typedef struct { char *text; size_t size; } Message;

static int fail(Message message, int code, const char *format, long long a, long long b) {
  snprintf(message.text, message.size, format, a, b);
  return code;
}

static int encode_map(const int64_t *w, unsigned char *params, void *const *operands, Message message) {
  uint64_t dims[5], strides[5];
  uint32_t box[5], ones[5] = {1, 1, 1, 1, 1};
  for (int axis = 0; axis < 5; ++axis) {
    dims[axis] = (uint64_t)w[7 + axis];
    strides[axis] = (uint64_t)w[12 + axis];
    box[axis] = (uint32_t)w[17 + axis];
  }
  if (!encode_tiled) return fail(message, kInternal, "cuflash: the driver has no cuTensorMapEncodeTiled", 0, 0);
  int rc = encode_tiled(params + w[0], (int)w[3], (uint32_t)w[4], (char *)operands[w[1]] + w[2], dims, strides, box,
                        ones, 0, (int)w[5], (int)w[6], 0);
  return rc ? fail(message, kInternal, "cuflash: cuTensorMapEncodeTiled returned %lld", rc, 0) : kOk;
}

static int launch(const int64_t *w, const int64_t *body, void *const *operands, void *stream, int device,
                  Message message) {
  void *function = find_kernel((uint64_t)w[0], device);
  if (!function)
    return fail(message, kMissing,
                "cuflash: kernel %016llx is not loaded on device %lld of this process; trace the same call once "
                "(jax.eval_shape is enough) before running a deserialised program", w[0], device);
  _Alignas(64) unsigned char params[kMaxParams];
  memcpy(params, body, (size_t)w[6]);
  body += (w[6] + 7) / 8;
  for (int64_t i = 0; i < w[7]; ++i, body += kPointerWords) {
    char *address = (char *)operands[body[1]] + body[2];
    memcpy(params + body[0], &address, sizeof address);
  }
  for (int64_t i = 0; i < w[8]; ++i, body += kMapWords) {
    int code = encode_map(body, params, operands, message);
    if (code) return code;
  }
  LaunchAttribute attributes[2];
  LaunchConfig config = {{(unsigned)w[1], 1, 1}, {(unsigned)w[2], 1, 1}, (unsigned)w[3], stream, attributes, 0};
  memset(attributes, 0, sizeof attributes);
  if (w[4] > 1) {
    LaunchAttribute *attribute = &attributes[config.num_attributes++];
    attribute->id = kAttributeCluster;
    attribute->value.cluster[0] = (unsigned)w[4];
    attribute->value.cluster[1] = attribute->value.cluster[2] = 1;
  }
  if (w[5] && !is_captured(stream)) {
    LaunchAttribute *attribute = &attributes[config.num_attributes++];
    attribute->id = kAttributeOverlap;
    attribute->value.overlap = 1;
  }
  void *arguments[1] = {params};
  int rc = launch_kernel(&config, function, arguments, NULL);
  return rc ? fail(message, kInternal, "cuflash: cuLaunchKernelEx returned %lld for kernel %016llx", rc, w[0]) : kOk;
}

/* Whether a launch at w stays inside the words and names operands that exist. Its length in words, or 0. */
static int64_t checked_length(const int64_t *w, int64_t left, int64_t num_operands) {
  if (left < kLaunchWords || w[6] < 0 || w[6] > kMaxParams || w[7] < 0 || w[7] > kMaxParams || w[8] < 0 || w[8] > 64)
    return 0;
  int64_t param_words = (w[6] + 7) / 8;
  int64_t length = kLaunchWords + param_words + w[7] * kPointerWords + w[8] * kMapWords;
  if (left < length) return 0;
  const int64_t *body = w + kLaunchWords + param_words;
  for (int64_t i = 0; i < w[7]; ++i, body += kPointerWords)
    if (body[0] < 0 || body[0] + 8 > w[6] || body[1] < 0 || body[1] >= num_operands) return 0;
  for (int64_t i = 0; i < w[8]; ++i, body += kMapWords)
    if (body[0] < 0 || body[0] + kMapBytes > w[6] || body[1] < 0 || body[1] >= num_operands || body[4] < 1 ||
        body[4] > 5)
      return 0;
  return length;
}

/* Queues every launch of the plan on the stream. device < 0 means the one of the current context.
   0, or an error code with its text in message. */
int cuflash_run(const int64_t *words, int64_t count, void *const *operands, int64_t num_operands, void *stream,
                int device, char *text, size_t text_size) {
  Message message = {text, text_size};
  if (count < kHeaderWords || words[0] != kVersion || words[1] != num_operands)
    return fail(message, kInvalid, "cuflash: plan of version %lld for %lld operands is not understood",
                count ? words[0] : 0, num_operands);
  if (load_driver()) return fail(message, kInternal, "cuflash: libcuda.so.1 of CUDA 12 or newer is not here", 0, 0);
  if (device < 0) {
    int rc = current_device(&device);
    if (rc) return fail(message, kInternal, "cuflash: cuCtxGetDevice returned %lld", rc, 0);
  }
  int no_context = ensure_context(device);
  if (no_context) return fail(message, kInternal, "cuflash: no context on device %lld (error %lld)", device, no_context);
  if (words[3] > 0 && num_operands > 0) { /* the workspace is the last operand */
    int rc = memset_words(operands[num_operands - 1], 0, (size_t)words[3], stream);
    if (rc) return fail(message, kInternal, "cuflash: cuMemsetD32Async returned %lld", rc, 0);
  }
  int64_t at = kHeaderWords;
  for (int64_t i = 0; i < words[2]; ++i) {
    int64_t length = checked_length(words + at, count - at, num_operands);
    if (!length) return fail(message, kInvalid, "cuflash: launch %lld of the plan is damaged", i, 0);
    int code = launch(words + at, words + at + kLaunchWords, operands, stream, device, message);
    if (code) return code;
    at += length;
  }
  return kOk;
}

/* ---- the door for XLA's FFI ----------------------------------------------------------------------------------- */

typedef struct FfiExtension { size_t struct_size; int32_t type; struct FfiExtension *next; } FfiExtension;
typedef struct { size_t struct_size; FfiExtension *extension; int32_t major, minor; } FfiVersion;
typedef struct { size_t struct_size; FfiVersion version; uint32_t traits; } FfiMetadata; /* leading fields */
typedef struct { FfiExtension base; FfiMetadata *metadata; } FfiMetadataExtension;
typedef struct { size_t struct_size; FfiExtension *extension; int32_t dtype; void *data; } FfiBuffer; /* leading */
typedef struct { size_t struct_size; FfiExtension *extension; int64_t size; int32_t *types; void **items; } FfiList;
typedef struct { const char *text; size_t length; } FfiSpan;
typedef struct { int32_t dtype; size_t size; void *data; } FfiArray;
typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  int64_t size;
  int32_t *types;
  FfiSpan **names;
  void **values;
} FfiAttributes;
typedef struct { size_t struct_size; FfiExtension *extension; const char *message; int32_t code; } FfiErrorCreate;
typedef struct { size_t struct_size; FfiExtension *extension; void *context; void *stream; } FfiStreamGet;
typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  FfiVersion version;
  const void *internal;
  void *(*error_create)(FfiErrorCreate *);
  void *error_message, *error_destroy, *handler_register;
  void *(*stream_get)(FfiStreamGet *);
} FfiApi; /* leading fields */
typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  const FfiApi *api;
  void *context;
  int32_t stage;
  FfiList arguments, results;
  FfiAttributes attributes;
} FfiCallFrame; /* leading fields */

enum { kExtensionMetadata = 1, kAttributeArray = 1, kCommandBufferCompatible = 1, kMaxOperands = 32 };

static void *ffi_error(const FfiApi *api, int code, const char *text) {
  FfiErrorCreate arguments = {offsetof(FfiErrorCreate, code) + sizeof(int32_t), NULL, text, code};
  return api->error_create(&arguments);
}

/* Every launch of a plan is the same device work on every run, so XLA may record it into a CUDA graph. */
static int answers_metadata(FfiCallFrame *frame) {
  if (!frame->extension || frame->extension->type != kExtensionMetadata) return 0;
  FfiMetadata *metadata = ((FfiMetadataExtension *)frame->extension)->metadata;
  metadata->version.major = 0;
  metadata->version.minor = 1;
  metadata->traits = kCommandBufferCompatible;
  return 1;
}

static void *run_frame(FfiCallFrame *frame, void *stream, int device) {
  const FfiArray *plan = NULL;
  for (int64_t i = 0; i < frame->attributes.size; ++i) {
    const FfiSpan *name = frame->attributes.names[i];
    if (frame->attributes.types[i] == kAttributeArray && name->length == 4 && !memcmp(name->text, "plan", 4))
      plan = (const FfiArray *)frame->attributes.values[i];
  }
  void *operands[kMaxOperands];
  int64_t count = 0;
  if (!plan || frame->arguments.size + frame->results.size > kMaxOperands)
    return ffi_error(frame->api, kInvalid, "cuflash: the call carries no plan, or too many operands");
  for (int64_t i = 0; i < frame->arguments.size; ++i) operands[count++] = ((FfiBuffer *)frame->arguments.items[i])->data;
  for (int64_t i = 0; i < frame->results.size; ++i) operands[count++] = ((FfiBuffer *)frame->results.items[i])->data;
  char text[320];
  int code = cuflash_run(plan->data, (int64_t)plan->size, operands, count, stream, device, text, sizeof text);
  return code ? ffi_error(frame->api, code, text) : NULL;
}

/* XLA's platform CUDA: the stream is the one the program runs on, and its context is current. */
void *cuflash_xla_cuda(FfiCallFrame *frame) {
  if (answers_metadata(frame)) return NULL;
  FfiStreamGet get = {offsetof(FfiStreamGet, stream) + sizeof(void *), NULL, frame->context, NULL};
  void *error = frame->api->stream_get(&get);
  return error ? error : run_frame(frame, get.stream, -1); /* ownership of an error passes to XLA */
}

/* XLA's platform cpu, over the emulator as driver. */
void *cuflash_xla_host(FfiCallFrame *frame) {
  return answers_metadata(frame) ? NULL : run_frame(frame, NULL, 0);
}

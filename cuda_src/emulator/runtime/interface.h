// What the host twins of ptx/ ask of the emulator. Kernels are compiled against this file alone: no standard headers.
#pragma once
#include "ptx/types.cuh"

#pragma GCC visibility push(default)
namespace cuflash::emulator {

// Where in the kernel's sources a primitive was called; filled in by default arguments of the twins.
struct Location {
  const char* file;
  int line;
};

// The current thread. Constant for a thread's whole life, so the compiler may keep the answers.
uint32_t thread_index() __attribute__((const));
uint32_t thread_count() __attribute__((const));
uint32_t block_index() __attribute__((const));
uint32_t grid_size() __attribute__((const));

// First byte of dynamic shared memory: not 0, so that a forgotten base address is out of bounds.
inline constexpr uint32_t kSharedBase = 1024;

void load_shared(void* value, uint32_t address, uint32_t bytes, Location at);
void store_shared(uint32_t address, const void* value, uint32_t bytes, Location at);
void load_global(void* value, const void* pointer, uint32_t bytes, Location at);
void store_global(void* pointer, const void* value, uint32_t bytes, Location at);
void red_add(float* pointer, const float* values, int count, Location at);
uint32_t atomic_add(uint32_t* pointer, uint32_t value, Location at);
uint32_t load_acquire(const uint32_t* pointer, Location at);
void store_release(uint32_t* pointer, uint32_t value, Location at);

void barrier(int id, int count, bool waits, Location at);
bool barrier_or(bool predicate, Location at);
void sync_warp(Location at);
uint32_t shuffle(uint32_t value, int source_lane, Location at);
uint32_t ballot(bool predicate, Location at);

// tiles: 2 or 4 registers and 8x8 tiles.
void ldmatrix(uint32_t* registers, int tiles, bool transposed, uint32_t address, Location at);
void stmatrix(uint32_t address, const uint32_t* registers, int tiles, bool transposed, Location at);
enum class MmaKind { float16, bfloat16, tf32 };
void mma(MmaKind kind, float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Location at);

void cp_async(uint32_t dst, const void* src, int bytes, int valid_bytes, Location at);
void cp_async_commit();
void cp_async_wait(int groups, Location at);

void mbarrier_init(uint32_t barrier, uint32_t arrivals, Location at);
void mbarrier_init_fence();
void mbarrier_arrive(uint32_t barrier, uint32_t expected_bytes, Location at);
void mbarrier_wait(uint32_t barrier, uint32_t parity, Location at);
bool mbarrier_test(uint32_t barrier, uint32_t parity, Location at);

enum class BulkKind { load, store, reduce_add };
void tma(BulkKind kind, const ptx::TensorMap* map, uint32_t shared, uint32_t barrier, const int* coordinates, int rank,
         Location at);
void bulk(BulkKind kind, const void* global, uint32_t shared, uint32_t bytes, uint32_t barrier, Location at);
void bulk_commit();
void bulk_wait(int groups, bool read_only, Location at);
void fence_proxy_async();

void wgmma_fence(Location at);
// a is null in the form that reads A through desc_a.
void wgmma(bool is_bfloat16, int n, float* d, const uint32_t* a, uint64_t desc_a, uint64_t desc_b, bool accumulate,
           bool trans_a, bool trans_b, Location at);
void wgmma_commit(Location at);
void wgmma_wait(int groups, Location at);
void setmaxnreg(int count, bool increase, Location at);

// A load (kind 0) or store (1) through a pointer in an instrumented kernel; code_offset is where, in its library.
void instrumented_access(const void* pointer, unsigned long bytes, int kind, unsigned long code_offset);

}  // namespace cuflash::emulator
#pragma GCC visibility pop

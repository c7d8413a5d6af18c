// One thin wrapper per PTX instruction of Blackwell's tensor memory and packed arithmetic; the continuation of
// hopper/ptx.cuh, under the same rules. Source of each: PTX ISA 9.0, the chapter of the same name.
#pragma once

#include "hopper/ptx.cuh"

namespace ptx {

// One lane of the warp, the same every time.
__device__ __forceinline__ bool elect_sync() {
  uint32_t d;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.b32 %0, 1, 0, p;\n\t}" : "=r"(d));
  return d != 0;
}

// ---- cp.async.bulk ---------------------------------------------------------------------------------------------

// Until what this thread's groups read may be overwritten.
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Until this thread's groups are done.
__device__ __forceinline__ void cp_async_bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- tcgen05: tensor memory ------------------------------------------------------------------------------------

// The address of `columns` columns goes to shared memory. By a whole warp.
__device__ __forceinline__ void tcgen05_alloc(uint32_t shared, uint32_t columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared), "r"(columns)
               : "memory");
}

__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}

__device__ __forceinline__ void tcgen05_dealloc(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
}

// tcgen05 operations of this thread so far are ordered before what follows the synchronisation that comes next.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// tcgen05 operations that follow are ordered behind the synchronisation that came last.
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void tcgen05_wait_ld() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void tcgen05_wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// N columns of this warp's 32 lanes, a lane per thread: register i is column i. Lists of registers: TMEM_Rn names n of
// them from %0 on, TMEM_OUTn and TMEM_INn bind elements of an array.
#define TMEM_R4 "%0, %1, %2, %3"
#define TMEM_R8 TMEM_R4 ", %4, %5, %6, %7"
#define TMEM_R16 TMEM_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TMEM_R32 \
  TMEM_R16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TMEM_OUT4(d, i) "=r"(d[i]), "=r"(d[i + 1]), "=r"(d[i + 2]), "=r"(d[i + 3])
#define TMEM_OUT8(d, i) TMEM_OUT4(d, i), TMEM_OUT4(d, i + 4)
#define TMEM_OUT32(d) TMEM_OUT8(d, 0), TMEM_OUT8(d, 8), TMEM_OUT8(d, 16), TMEM_OUT8(d, 24)
#define TMEM_FLOAT4(d, i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define TMEM_FLOAT16(d, i) TMEM_FLOAT4(d, i), TMEM_FLOAT4(d, i + 4), TMEM_FLOAT4(d, i + 8), TMEM_FLOAT4(d, i + 12)
#define TMEM_FLOAT32(d) TMEM_FLOAT16(d, 0), TMEM_FLOAT16(d, 16)
#define TMEM_FLOATS4(d, i) "f"(d[i]), "f"(d[i + 1]), "f"(d[i + 2]), "f"(d[i + 3])
#define TMEM_FLOATS16(d, i) TMEM_FLOATS4(d, i), TMEM_FLOATS4(d, i + 4), TMEM_FLOATS4(d, i + 8), TMEM_FLOATS4(d, i + 12)
#define TMEM_FLOATS32(d) TMEM_FLOATS16(d, 0), TMEM_FLOATS16(d, 16)
#define TMEM_IN4(d, i) "r"(d[i]), "r"(d[i + 1]), "r"(d[i + 2]), "r"(d[i + 3])
#define TMEM_IN8(d, i) TMEM_IN4(d, i), TMEM_IN4(d, i + 4)
#define TMEM_IN32(d) TMEM_IN8(d, 0), TMEM_IN8(d, 8), TMEM_IN8(d, 16), TMEM_IN8(d, 24)

__device__ __forceinline__ uint32_t tcgen05_ld_x1(uint32_t address) {
  uint32_t d;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(d) : "r"(address) : "memory");
  return d;
}

__device__ __forceinline__ void tcgen05_ld_x4(uint32_t (&d)[4], uint32_t address) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.b32 {" TMEM_R4 "}, [%4];"
               : TMEM_OUT4(d, 0)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void tcgen05_ld_x8(uint32_t (&d)[8], uint32_t address) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {" TMEM_R8 "}, [%8];"
               : TMEM_OUT8(d, 0)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void tcgen05_ld_x16(uint32_t (&d)[16], uint32_t address) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 {" TMEM_R16 "}, [%16];"
               : TMEM_OUT8(d, 0), TMEM_OUT8(d, 8)
               : "r"(address)
               : "memory");
}

// 32 columns into d[0..31], and their largest; NaN if one is.
#if defined(__CUDA_ARCH_FEAT_SM103_ALL)
__device__ __forceinline__ void tcgen05_ld_red_x32(float* d, float& largest, uint32_t address) {
  asm volatile("tcgen05.ld.red.sync.aligned.32x32b.x32.max.NaN.f32 {" TMEM_R32 "}, %32, [%33];"
               : TMEM_FLOAT32(d), "=f"(largest)
               : "r"(address)
               : "memory");
}
#endif

// 32 columns into d[0..31].
__device__ __forceinline__ void tcgen05_ld_x32(uint32_t* d, uint32_t address) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {" TMEM_R32 "}, [%32];"
               : TMEM_OUT32(d)
               : "r"(address)
               : "memory");
}

// The same as FP32 numbers.
__device__ __forceinline__ void tcgen05_ld_x32(float* d, uint32_t address) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {" TMEM_R32 "}, [%32];"
               : TMEM_FLOAT32(d)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void tcgen05_st_x1(uint32_t address, uint32_t a) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%1], {%0};" ::"r"(a), "r"(address) : "memory");
}

__device__ __forceinline__ void tcgen05_st_x8(uint32_t address, const uint32_t* a) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%8], {" TMEM_R8 "};" ::TMEM_IN8(a, 0), "r"(address) : "memory");
}

__device__ __forceinline__ void tcgen05_st_x32(uint32_t address, const uint32_t* a) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], {" TMEM_R32 "};" ::TMEM_IN32(a), "r"(address) : "memory");
}

__device__ __forceinline__ void tcgen05_st_x32(uint32_t address, const float* a) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], {" TMEM_R32 "};" ::TMEM_FLOATS32(a), "r"(address)
               : "memory");
}

#undef TMEM_R4
#undef TMEM_R8
#undef TMEM_R16
#undef TMEM_R32
#undef TMEM_OUT4
#undef TMEM_OUT8
#undef TMEM_OUT32
#undef TMEM_FLOATS4
#undef TMEM_FLOATS16
#undef TMEM_FLOATS32
#undef TMEM_FLOAT4
#undef TMEM_FLOAT16
#undef TMEM_FLOAT32
#undef TMEM_IN4
#undef TMEM_IN8
#undef TMEM_IN32

// ---- tcgen05: the tensor core ----------------------------------------------------------------------------------

// 32 lines of 16 bytes to 4 columns of lanes 0..31, and copies to the other three quadrants. By one thread.
__device__ __forceinline__ void tcgen05_cp_32x128b_warpx4(uint32_t address, uint64_t descriptor) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
}

// One arrival at the barrier once all tcgen05 operations that this thread issued before are done.
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
}

// D = A B, or += where `accumulate` is not 0; A and B in shared memory. By one thread.
__device__ __forceinline__ void tcgen05_mma_mxf8f6f4_ss(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                                                        uint32_t scales_a, uint32_t scales_b, uint32_t accumulate) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %6, 0;\n\t"
      "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [%0], %1, %2, %3, [%4], [%5], p;\n\t}" ::
          "r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(scales_a), "r"(scales_b), "r"(accumulate)
      : "memory");
}

// The same with A in tensor memory.
__device__ __forceinline__ void tcgen05_mma_mxf8f6f4_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction,
                                                        uint32_t scales_a, uint32_t scales_b, uint32_t accumulate) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %6, 0;\n\t"
      "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [%0], [%1], %2, %3, [%4], [%5], p;\n\t}" ::
          "r"(d),
      "r"(a), "l"(b), "r"(instruction), "r"(scales_a), "r"(scales_b), "r"(accumulate)
      : "memory");
}

// E2M1 under UE4M3 scales of 16.
__device__ __forceinline__ void tcgen05_mma_mxf4nvf4_ss(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                                                        uint32_t scales_a, uint32_t scales_b, uint32_t accumulate) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %6, 0;\n\t"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [%0], %1, %2, %3, [%4], [%5], p;\n\t}" ::
          "r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(scales_a), "r"(scales_b), "r"(accumulate)
      : "memory");
}

// ---- FP32 ------------------------------------------------------------------------------------------------------

// Two FP32 numbers in a register pair.
__device__ __forceinline__ uint64_t pack_f32x2(float low, float high) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "f"(low), "f"(high));
  return d;
}

__device__ __forceinline__ float2 unpack_f32x2(uint64_t a) {
  float2 d;
  asm("mov.b64 {%0, %1}, %2;" : "=f"(d.x), "=f"(d.y) : "l"(a));
  return d;
}

__device__ __forceinline__ uint64_t fma_rn_f32x2(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t d;
  asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(d) : "l"(a), "l"(b), "l"(c));
  return d;
}

__device__ __forceinline__ uint64_t fma_rm_f32x2(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t d;
  asm("fma.rm.f32x2 %0, %1, %2, %3;" : "=l"(d) : "l"(a), "l"(b), "l"(c));
  return d;
}

__device__ __forceinline__ uint64_t fma_rp_f32x2(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t d;
  asm("fma.rp.f32x2 %0, %1, %2, %3;" : "=l"(d) : "l"(a), "l"(b), "l"(c));
  return d;
}

__device__ __forceinline__ uint64_t mul_rn_f32x2(uint64_t a, uint64_t b) {
  uint64_t d;
  asm("mul.rn.f32x2 %0, %1, %2;" : "=l"(d) : "l"(a), "l"(b));
  return d;
}

__device__ __forceinline__ uint64_t sub_rn_f32x2(uint64_t a, uint64_t b) {
  uint64_t d;
  asm("sub.rn.f32x2 %0, %1, %2;" : "=l"(d) : "l"(a), "l"(b));
  return d;
}

// The largest of three; NaN if one is.
__device__ __forceinline__ float max_nan_f32(float a, float b, float c) {
  float d;
  asm("max.NaN.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

// The largest magnitude of three; NaN if one is.
__device__ __forceinline__ float max_nan_abs_f32(float a, float b, float c) {
  float d;
  asm("max.NaN.abs.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

// Four E4M3 codes, the first in the lowest byte: two conversions, of which the second keeps the other half of its word.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e4m3x2_f32_twice(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

// About 2^x.
__device__ __forceinline__ float ex2_approx_f32(float x) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

}  // namespace ptx

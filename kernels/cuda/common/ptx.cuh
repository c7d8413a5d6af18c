// One thin wrapper per PTX instruction. Every kernel reaches PTX through this file alone, so that what has to be
// trusted, and what a simulator has to know, is listed in one place. A wrapper has the name of its instruction and
// adds nothing to it. Source of each: PTX ISA 9.0, the chapter of the same name.
#pragma once

#if !defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(__CUDA_ARCH_FEAT_SM100_ALL) && !defined(__CUDA_ARCH_FEAT_SM103_ALL)
#error "compile for an exact target: sm_90a, sm_100a or sm_103a"
#endif

// Whether cvt knows ue8m0x2 and e2m1x2: the a-targets of compute capability 10.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
#define HAS_NARROW_CVT 1
#else
#define HAS_NARROW_CVT 0
#endif

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;

static_assert(sizeof(void*) == 8 && sizeof(int64_t) == 8, "pointers and offsets are 64 bits");

namespace ptx {

// ---- ld, st ----------------------------------------------------------------------------------------------------

// Data that is read once: through the read-only path, without a place in L1.
__device__ __forceinline__ uint4 ld_global_nc_v4(const void* address) {
  uint4 d;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "l"(address));
  return d;
}

__device__ __forceinline__ uint2 ld_global_nc_v2(const void* address) {
  uint2 d;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(d.x), "=r"(d.y) : "l"(address));
  return d;
}

__device__ __forceinline__ uint32_t ld_global_nc_b32(const void* address) {
  uint32_t d;
  asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(d) : "l"(address));
  return d;
}

__device__ __forceinline__ uint32_t ld_global_nc_u16(const void* address) {
  uint16_t d;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(d) : "l"(address));
  return d;
}

__device__ __forceinline__ void st_global_v4(void* address, uint4 d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(d.x), "r"(d.y), "r"(d.z), "r"(d.w)
               : "memory");
}

__device__ __forceinline__ void st_global_v2(void* address, uint32_t x, uint32_t y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void st_global_b32(void* address, uint32_t d) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(d) : "memory");
}

__device__ __forceinline__ void st_global_u16(void* address, uint32_t d) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(static_cast<uint16_t>(d)) : "memory");
}

// ---- cp.async --------------------------------------------------------------------------------------------------

// 16 bytes from global to shared memory, past L1; `size` 16 or 0: what is left of the 16 bytes becomes zeros.
__device__ __forceinline__ void cp_async_cg_16(uint32_t shared, const void* global, uint32_t size) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(size) : "memory");
}

// 4 bytes, through L1.
__device__ __forceinline__ void cp_async_ca_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most N of this thread's groups are under way.
template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- integers and lanes ----------------------------------------------------------------------------------------

// The smaller of each half.
__device__ __forceinline__ uint32_t min_u16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("min.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// The sum of each half, modulo 2^16.
__device__ __forceinline__ uint32_t add_u16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Four of the eight bytes of b:a, the first of them the lowest of a: byte i is the one that nibble i of `which` names.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t which) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(which));
  return d;
}

// What the lanes of the warp wrote to memory before is seen by all of them after.
__device__ __forceinline__ void bar_warp_sync() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

__device__ __forceinline__ uint32_t shfl_bfly(uint32_t a, uint32_t lanes) {
  uint32_t d;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(d) : "r"(a), "r"(lanes));
  return d;
}

__device__ __forceinline__ uint32_t shfl_idx(uint32_t a, uint32_t lane) {
  uint32_t d;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(d) : "r"(a), "r"(lane));
  return d;
}

__device__ __forceinline__ uint32_t shfl_up(uint32_t a, uint32_t lanes) {
  uint32_t d;
  asm volatile("shfl.sync.up.b32 %0, %1, %2, 0, 0xffffffff;" : "=r"(d) : "r"(a), "r"(lanes));
  return d;
}

// The largest of all lanes.
__device__ __forceinline__ uint32_t redux_max_u32(uint32_t a) {
  uint32_t d;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(a));
  return d;
}

// Bit i: whether lane i holds true.
__device__ __forceinline__ uint32_t vote_ballot(bool a) {
  uint32_t d;
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %1, 0;\n\tvote.sync.ballot.b32 %0, p, 0xffffffff;\n\t}"
               : "=r"(d)
               : "r"(uint32_t(a)));
  return d;
}

__device__ __forceinline__ uint32_t match_any(uint32_t a) {
  uint32_t d;
  asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(a));
  return d;
}

__device__ __forceinline__ uint32_t lanemask_lt() {
  uint32_t d;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(d));
  return d;
}

// ---- FP32 ------------------------------------------------------------------------------------------------------

// fl(1 / x), rounded to nearest even, subnormals included.
__device__ __forceinline__ float rcp_rn_f32(float x) {
  float d;
  asm("rcp.rn.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

// The larger magnitude under the product of the signs; 0x7FFFFFFF if one is NaN.
__device__ __forceinline__ float max_nan_xorsign_abs_f32(float a, float b) {
  float d;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// The same of each half; 0x7FFF if one is NaN.
__device__ __forceinline__ uint32_t max_nan_xorsign_abs_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t max_nan_xorsign_abs_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// ---- cvt -------------------------------------------------------------------------------------------------------

// Two E4M3 codes: `low` in bits 0..7, `high` in bits 8..15. Saturates; NaN gives 0x7F.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}

// The values of two E4M3 codes as binary16, exactly.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint32_t codes) {
  uint32_t d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(static_cast<uint16_t>(codes)));
  return d;
}

__device__ __forceinline__ float cvt_f32_f16(uint32_t half) {
  float d;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(static_cast<uint16_t>(half)));
  return d;
}

__device__ __forceinline__ uint32_t cvt_rn_f16_f32(float x) {
  uint16_t d;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
  return d;
}

// Two binary16 numbers: `low` in bits 0..15, `high` in bits 16..31.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float high, float low) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ uint32_t cvt_rn_bf16_f32(float x) {
  uint16_t d;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
  return d;
}

// Two bfloat16 numbers: `low` in bits 0..15, `high` in bits 16..31.
__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// The same, but a number beyond bfloat16's largest, infinities included, gives that one with its sign. NaN stays NaN.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_bf16x2_f32(float high, float low) {
  uint32_t d;
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

#if HAS_NARROW_CVT
// Two E2M1 codes: `low` in bits 0..3, `high` in bits 4..7. Saturates; NaN gives 7.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e2m1x2_f32(float high, float low) {
  uint32_t d;
  asm("{\n\t.reg .b8 codes;\n\tcvt.rn.satfinite.e2m1x2.f32 codes, %1, %2;\n\tcvt.u32.u8 %0, codes;\n\t}"
      : "=r"(d)
      : "f"(high), "f"(low));
  return d;
}

// Two E8M0 bytes, rounded up: `low` in bits 0..7, `high` in bits 8..15. The sign is ignored.
__device__ __forceinline__ uint32_t cvt_rp_satfinite_ue8m0x2_f32(float high, float low) {
  uint16_t d;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}
#endif

}  // namespace ptx

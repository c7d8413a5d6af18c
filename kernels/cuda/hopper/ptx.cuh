// One thin wrapper per PTX instruction of Hopper's asynchronous machinery: mbarrier, bulk copies, named barriers,
// wgmma; the continuation of common/ptx.cuh, under its rules. Source of each: PTX ISA 9.0, the chapter of that name.
#pragma once

#include "common/ptx.cuh"

namespace ptx {

// ---- addresses -------------------------------------------------------------------------------------------------

// A shared-memory address as the instructions below take it.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// ---- mbarrier --------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Initialised barriers become visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive as many.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Note [Arrivals]
// ~~~~~~~~~~~~~~~
// One lane arrives for its warp, after `bar_warp_sync`: what the other lanes have read and written comes before that.
// The race checker of compute-sanitizer takes only what the arriving lane did for done. For it, with EVERY_LANE_ARRIVES
// defined, each lane arrives (tests/kernels/sanitize.py), and nothing else changes.
#ifdef EVERY_LANE_ARRIVES
constexpr uint32_t WARP_ARRIVALS = 32;
#else
constexpr uint32_t WARP_ARRIVALS = 1;
#endif
__device__ __forceinline__ bool arrives(uint32_t lane) { return WARP_ARRIVALS == 32 || lane == 0; }

// Arrive, and let the phase wait for so many bytes of bulk copies too.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity has completed; waits a while for it.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.b32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Whether the phase of this parity has completed; does not wait.
__device__ __forceinline__ bool mbarrier_test_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.b32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Wait for the phase of this parity, as one instruction to the compiler, which must not see a branch where products are
// under way.
__device__ __forceinline__ void mbarrier_wait_in_place(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred p;\nTRY:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t@!p bra TRY;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- cp.async.bulk ---------------------------------------------------------------------------------------------

// `bytes` (a multiple of 16) from global to shared memory; the barrier counts them.
__device__ __forceinline__ void cp_async_bulk_shared_global(uint32_t shared, const void* global, uint32_t bytes,
                                                            uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same, where L2 shall treat the data as `policy` says.
__device__ __forceinline__ void cp_async_bulk_shared_global(uint32_t shared, const void* global, uint32_t bytes,
                                                            uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// For data that is read once: the first to leave L2.
__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t d;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(d));
  return d;
}

// `bytes` (a multiple of 16) from shared to global memory, in the open group of this thread.
__device__ __forceinline__ void cp_async_bulk_global_shared(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until shared memory has been read by all of this thread's groups; or until they are done.
__device__ __forceinline__ void cp_async_bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void cp_async_bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Ordinary writes to shared memory become visible to wgmma and to the copy engine.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- barrier, setmaxnreg ---------------------------------------------------------------------------------------

// Named barriers: `threads` counts those that wait and those that only arrive.
__device__ __forceinline__ void barrier_sync(uint32_t name, uint32_t threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t name, uint32_t threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Whether the predicate holds in any lane.
__device__ __forceinline__ bool vote_any(bool a) {
  uint32_t d;
  asm volatile(
      "{\n\t.reg .pred p, q;\n\tsetp.ne.u32 p, %1, 0;\n\t"
      "vote.sync.any.pred q, p, 0xffffffff;\n\tselp.b32 %0, 1, 0, q;\n\t}"
      : "=r"(d)
      : "r"(uint32_t(a)));
  return d != 0;
}

// ---- FP32, BF16 ------------------------------------------------------------------------------------------------

// a b + c with one rounding, clamped to [0, 1]; NaN gives 0.
__device__ __forceinline__ float fma_rn_sat_f32(float a, float b, float c) {
  float d;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

// The same, rounded up before it is clamped.
__device__ __forceinline__ float fma_rp_sat_f32(float a, float b, float c) {
  float d;
  asm("fma.rp.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

// About 1 / x.
__device__ __forceinline__ float rcp_approx_f32(float x) {
  float d;
  asm("rcp.approx.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

// The product of each half, rounded; subnormals are kept.
__device__ __forceinline__ uint32_t mul_rn_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// The smaller magnitude of each half with the product's sign; a number before NaN.
__device__ __forceinline__ uint32_t min_xorsign_abs_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// ---- registers, memory ------------------------------------------------------------------------------------------

// threadIdx.x, read anew: what derives from it need not stay in registers from one use to the next.
__device__ __forceinline__ uint32_t thread_index() {
  uint32_t d;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(d));
  return d;
}

// Memory that this launch writes too.
__device__ __forceinline__ uint4 ld_global_v4(const void* address) {
  uint4 d;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "l"(address)
               : "memory");
  return d;
}

// Four 8x8 matrices of two-byte elements to shared memory. Lane t holds of each row t / 4, columns 2 (t % 4) and the next;
// and gives the address of row t % 8 of matrix t / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t* a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a[0]), "r"(a[1]),
               "r"(a[2]), "r"(a[3])
               : "memory");
}

// 8x8 matrices of 16-bit elements, transposed; of two, lanes 0 to 15 give the rows.
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t* d, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t* d, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
  uint4 d;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "r"(address)
               : "memory");
  return d;
}

__device__ __forceinline__ void st_shared_v4(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// ---- wgmma -----------------------------------------------------------------------------------------------------

// Registers and shared memory written before are what the next wgmma sees.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most N of this warpgroup's groups are under way.
template <int N>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The compiler must not move uses of a register past this point: it does not know when a wgmma writes it.
__device__ __forceinline__ void keep(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }

// Whatever the register holds is of no use: the compiler takes a wgmma that starts from zero for one that adds.
__device__ __forceinline__ void forget(float& x) { asm volatile("" : "=f"(x)); }

// The same number in another register. The assembler, which knows when that is needless, makes no copy.
__device__ __forceinline__ uint32_t mov_b32(uint32_t x) {
  uint32_t d;
  asm volatile("mov.b32 %0, %1;" : "=r"(d) : "r"(x));
  return d;
}

// Accumulator d: FP32 64 x N, N / 2 registers. Thread t holds in d[4 i + 2 h + c] row 16 (t / 32) + t % 32 / 4 + 8 h
// and column 8 i + 2 (t % 4) + c. Operands come as descriptors of shared memory or, a of bf16, as four registers of two
// elements each in the same arrangement. `accumulate` 0 starts from zero.
//
// Lists of registers for the templates of the instructions: WGMMA_Dn names n of them, WGMMA_On binds them.
#define WGMMA_D4 "%0, %1, %2, %3"
#define WGMMA_D32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D36 WGMMA_D32 ", %32, %33, %34, %35"
#define WGMMA_D64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D68 WGMMA_D64 ", %64, %65, %66, %67"
#define WGMMA_O4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_O16(d, i) WGMMA_O4(d, i), WGMMA_O4(d, i + 4), WGMMA_O4(d, i + 8), WGMMA_O4(d, i + 12)
#define WGMMA_O32(d) WGMMA_O16(d, 0), WGMMA_O16(d, 16)
#define WGMMA_O36(d) WGMMA_O32(d), WGMMA_O4(d, 32)
#define WGMMA_O64(d) WGMMA_O16(d, 0), WGMMA_O16(d, 16), WGMMA_O16(d, 32), WGMMA_O16(d, 48)
#define WGMMA_O68(d) WGMMA_O64(d), WGMMA_O4(d, 64)

// d += A B, E4M3, K = 32; both K-major in shared memory.
template <int N>
__device__ __forceinline__ void wgmma_e4m3_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
  static_assert(N == 64 || N == 128, "the wrappers that are needed");
  if constexpr (N == 64) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGMMA_D32 "}, %32, %33, p, 1, 1;\n\t}"
        : WGMMA_O32(d)
        : "l"(a), "l"(b), "r"(accumulate)
        : "memory");
  } else {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" WGMMA_D64 "}, %64, %65, p, 1, 1;\n\t}"
        : WGMMA_O64(d)
        : "l"(a), "l"(b), "r"(accumulate)
        : "memory");
  }
}

// The same, N = 64, with a in registers: rows r and r + 8, elements 4 (t % 4) and 16 further, four to a register.
__device__ __forceinline__ void wgmma_e4m3_rs_64(float (&d)[32], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGMMA_D32 "}, {%32, %33, %34, %35}, %36, p, 1, 1;\n\t}"
      : WGMMA_O32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
      : "memory");
}

// d += A B, bf16, K = 16; both in shared memory, K-major, or MN-major if MN_MAJOR is 1.
template <int N, int MN_MAJOR = 0>
__device__ __forceinline__ void wgmma_bf16_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
  static_assert(N == 64 || N == 128, "the wrappers that are needed");
  if constexpr (N == 64) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_D32 "}, %32, %33, p, 1, 1, %35, %35;\n\t}"
        : WGMMA_O32(d)
        : "l"(a), "l"(b), "r"(accumulate), "n"(MN_MAJOR)
        : "memory");
  } else {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_D64 "}, %64, %65, p, 1, 1, %67, %67;\n\t}"
        : WGMMA_O64(d)
        : "l"(a), "l"(b), "r"(accumulate), "n"(MN_MAJOR)
        : "memory");
  }
}

// d += A B, bf16, K = 16; A in registers, B MN-major in shared memory.
template <int N>
__device__ __forceinline__ void wgmma_bf16_rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) {
  static_assert(N == 8 || N == 64 || N == 72 || N == 128 || N == 136, "the wrappers that are needed");
  if constexpr (N == 8) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %9, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {" WGMMA_D4 "}, {%4, %5, %6, %7}, %8, "
        "p, 1, 1, 1;\n\t}"
        : WGMMA_O4(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
        : "memory");
  } else if constexpr (N == 64) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_D32 "}, {%32, %33, %34, %35}, %36, "
        "p, 1, 1, 1;\n\t}"
        : WGMMA_O32(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
        : "memory");
  } else if constexpr (N == 72) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %41, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {" WGMMA_D36 "}, {%36, %37, %38, %39}, %40, "
        "p, 1, 1, 1;\n\t}"
        : WGMMA_O36(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
        : "memory");
  } else if constexpr (N == 128) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_D64 "}, {%64, %65, %66, %67}, %68, "
        "p, 1, 1, 1;\n\t}"
        : WGMMA_O64(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
        : "memory");
  } else {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %73, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n136k16.f32.bf16.bf16 {" WGMMA_D68 "}, {%68, %69, %70, %71}, %72, "
        "p, 1, 1, 1;\n\t}"
        : WGMMA_O68(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
        : "memory");
  }
}

#undef WGMMA_D4
#undef WGMMA_D32
#undef WGMMA_D36
#undef WGMMA_D64
#undef WGMMA_D68
#undef WGMMA_O4
#undef WGMMA_O16
#undef WGMMA_O32
#undef WGMMA_O36
#undef WGMMA_O64
#undef WGMMA_O68

}  // namespace ptx

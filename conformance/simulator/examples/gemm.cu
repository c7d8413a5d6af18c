// D = A B^T + C on one tile of 128 x 128, K walked in tiles of 128 bytes: block-scaled FP8 or NVFP4 on tcgen05.
//
// Warps 0-3 put C into the accumulator, and D out of it; warp 4 loads; warp 5 multiplies. Two stages in shared memory.
//
// A_MN, B_MN   1: the operand's tiles hold the contracted index along their rows (MN-major), else along their bytes
// NVF4         1: E2M1 with UE4M3 scales of 16; 0: E4M3 with E8M0 scales of 32
// SFB_ROUTE    how B's scales reach tensor memory: 0 in tiles, beside B's payload; one byte per row for all of K:
//              1 from registers, 2 through a table in shared memory
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// ---- instructions ------------------------------------------------------------------------------------------------
#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE bool elect() {
  u32 d;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(d));
  return d;
}
DEVICE void init(u32 bar, u32 n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(n) : "memory");
}
DEVICE void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void arrive_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t@p bra done;\n\t"
      "bra again;\n\tdone:\n\t}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
DEVICE void load(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}
DEVICE void store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void fence_inits() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void alloc(u32 to, u32 columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "r"(columns) : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}
DEVICE void dealloc(u32 t, u32 columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(t), "r"(columns));
}
DEVICE void before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
DEVICE void after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
DEVICE void wait_ld() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
DEVICE void wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
DEVICE void commit(u32 bar) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(bar) : "memory");
}
DEVICE void copy_scales(u32 t, u64 descriptor) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(t), "l"(descriptor) : "memory");
}
#if NVF4
#define KIND "mxf4nvf4.block_scale.scale_vec::4X"
#else
#define KIND "mxf8f6f4.block_scale.scale_vec::1X"
#endif
DEVICE void mma(u32 d, u64 a, u64 b, u32 idesc, u32 sfa, u32 sfb, u32 accumulate) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %6, 0; tcgen05.mma.cta_group::1.kind::" KIND
               " [%0], %1, %2, %3, [%4], [%5], p;}" ::"r"(d),
               "l"(a), "l"(b), "r"(idesc), "r"(sfa), "r"(sfb), "r"(accumulate)
               : "memory");
}
#define EIGHT(X, i) X(i), X(i + 1), X(i + 2), X(i + 3), X(i + 4), X(i + 5), X(i + 6), X(i + 7)
#define LIST32                                                                                                      \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31}"
#define OUT(i) "=f"(r[i])
#define IN(i) "f"(r[i])
DEVICE void ld32(float (&r)[32], u32 t) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 " LIST32 ", [%32];"
               : EIGHT(OUT, 0), EIGHT(OUT, 8), EIGHT(OUT, 16), EIGHT(OUT, 24)
               : "r"(t)
               : "memory");
}
DEVICE void st32(u32 t, const float (&r)[32]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], " LIST32 ";" ::EIGHT(IN, 0), EIGHT(IN, 8), EIGHT(IN, 16),
               EIGHT(IN, 24), "r"(t)
               : "memory");
}
DEVICE void st4(u32 t, u32 w0, u32 w1, u32 w2, u32 w3) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x4.b32 [%0], {%1,%2,%3,%4};" ::"r"(t), "r"(w0), "r"(w1), "r"(w2), "r"(w3)
               : "memory");
}
DEVICE void store_shared(u32 to, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// ---- places ------------------------------------------------------------------------------------------------------
constexpr u32 STAGES = 2, TILE = 128 * 128, SF_BLOCKS = NVF4 ? 4 : 1, SF_TILE = 512 * SF_BLOCKS;
constexpr u32 STAGE = 2 * TILE + 2 * SF_TILE;
constexpr u32 SFB_TABLE = STAGES * STAGE, STAGING = SFB_TABLE + 1024, SHARED_BYTES = STAGING + 65536;
constexpr u32 LOADED = 2 * TILE + (SFB_ROUTE == 0 ? 2 : 1) * SF_TILE;
constexpr u32 COLUMNS = 256, D_COLUMN = 0, SCALE_COLUMN = 128;
DEVICE u32 sfa_column(u32 stage) { return SCALE_COLUMN + 32 * stage; }
DEVICE u32 sfb_column(u32 stage) { return SCALE_COLUMN + 16 + (SFB_ROUTE == 0 ? 32 * stage : 0); }

// ---- descriptors -------------------------------------------------------------------------------------------------
constexpr u64 VERSION = 1ull << 46, SWIZZLE_128 = 2ull << 61;
constexpr u32 STRIDE_OFFSET = 1024, SCALE_STRIDE = 128;
DEVICE u64 operand(u32 at) { return (at & 0x3ffff) >> 4 | (u64)(STRIDE_OFFSET >> 4) << 32 | VERSION | SWIZZLE_128; }
DEVICE u64 scales(u32 at) { return (at & 0x3ffff) >> 4 | (u64)(SCALE_STRIDE >> 4) << 32 | VERSION; }
constexpr u32 A_STEP = A_MN ? 32 * 128 : 32, B_STEP = B_MN ? 32 * 128 : 32;
constexpr u32 TYPES = NVF4 ? 1u << 7 | 1u << 10 : 1u << 23;
constexpr u32 SHAPE = 128u >> 3 << 17 | 128u >> 4 << 24;
constexpr u32 MAJORS = A_MN << 15 | B_MN << 16;
constexpr u32 IDESC = TYPES | SHAPE | MAJORS;
DEVICE u32 scale_ids(u32 step) { return NVF4 ? 0 : step << 29 | (SFB_ROUTE == 0 ? step : 0) << 4; }

extern "C" __global__ void __launch_bounds__(192, 1)
    gemm(const u8* A, const u8* SFA, const u8* B, const u8* SFB, const float* C, float* D, int tiles) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ __align__(8) u64 bars[6];
  __shared__ u32 tensor_base;
  const u32 thread = threadIdx.x, warp = __shfl_sync(~0u, thread >> 5, 0), smem = shared_address(shared);
  const u32 full = shared_address(bars), empty = full + 16, ready = full + 32, done = full + 40;

  // ---- set up ----
  if (thread == 160) {
    for (u32 s = 0; s < STAGES; ++s) {
      init(full + 8 * s, 1);
      init(empty + 8 * s, 1);
    }
    init(ready, 128);
    init(done, 1);
    fence_inits();
  }
  if (warp == 4) alloc(shared_address(&tensor_base), COLUMNS);
  before_sync();
  __syncthreads();
  after_sync();
  const u32 t = tensor_base;

  if (warp == 4) {
    // ---- load ----
    if (elect()) {
      for (u32 i = 0; i < tiles; ++i) {
        const u32 s = i % STAGES, phase = i / STAGES & 1, at = smem + s * STAGE, bar = full + 8 * s;
        wait(empty + 8 * s, phase ^ 1);
        arrive_expect(bar, LOADED);
        load(at, A + i * TILE, TILE, bar);
        load(at + TILE, B + i * TILE, TILE, bar);
        load(at + 2 * TILE, SFA + i * SF_TILE, SF_TILE, bar);
        if (SFB_ROUTE == 0) load(at + 2 * TILE + SF_TILE, SFB + i * SF_TILE, SF_TILE, bar);
      }
    }
    __syncwarp();
  } else if (warp == 5) {
    // ---- multiply ----
    if (elect()) {
      wait(ready, 0);
      if (SFB_ROUTE == 2) copy_scales(t + sfb_column(0), scales(smem + SFB_TABLE));
      for (u32 k = 0; k < tiles; ++k) {
        const u32 s = k % STAGES, phase = k / STAGES & 1, at = smem + s * STAGE;
        wait(full + 8 * s, phase);
        after_sync();  // behind the stores of C, and behind the products that freed this stage and read its scales
        for (u32 j = 0; j < SF_BLOCKS; ++j) {
          copy_scales(t + sfa_column(s) + 4 * j, scales(at + 2 * TILE + 512 * j));
          if (SFB_ROUTE == 0) copy_scales(t + sfb_column(s) + 4 * j, scales(at + 2 * TILE + SF_TILE + 512 * j));
        }
        for (u32 step = 0; step < 4; ++step) {
          const u32 column = NVF4 ? 4 * step : 0;
          mma(t + D_COLUMN, operand(at + A_STEP * step), operand(at + TILE + B_STEP * step), IDESC | scale_ids(step),
              t + sfa_column(s) + column, t + sfb_column(s) + column, 1);
        }
        commit(empty + 8 * s);
      }
      commit(done);
    }
    __syncwarp();
  } else {
    // ---- C into the accumulator, and B's scales if they are one byte per row ----
    const u32 mine = t + (warp << 21);
    for (u32 c = 0; c < 128; c += 32) {
      float r[32];
      for (u32 i = 0; i < 32; ++i) r[i] = C[thread * 128 + c + i];
      st32(mine + D_COLUMN + c, r);
    }
    if (SFB_ROUTE == 1) {
      u32 w[4];
      for (u32 j = 0; j < 4; ++j) w[j] = SFB[thread % 32 + 32 * j] * 0x01010101u;
      st4(mine + sfb_column(0), w[0], w[1], w[2], w[3]);
    }
    if (SFB_ROUTE == 2) {
      *(u32*)(shared + SFB_TABLE + thread % 32 * 16 + thread / 32 * 4) = SFB[thread] * 0x01010101u;
      fence_async_proxy();
    }
    wait_st();
    before_sync();
    arrive(ready);

    // ---- D out of it ----
    wait(done, 0);
    after_sync();
    for (u32 c = 0; c < 128; c += 32) {
      float r[32];
      ld32(r, mine + D_COLUMN + c);
      wait_ld();
      for (u32 i = 0; i < 32; i += 4)
        store_shared(smem + STAGING + thread * 512 + (c + i) * 4, r[i], r[i + 1], r[i + 2], r[i + 3]);
    }
    fence_async_proxy();
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (thread == 0) {
      store(D, smem + STAGING, 65536);
      store_commit();
      store_wait();
    }
  }

  // ---- tear down ----
  before_sync();
  __syncthreads();
  if (warp == 4) {
    after_sync();
    dealloc(t, COLUMNS);
  }
}

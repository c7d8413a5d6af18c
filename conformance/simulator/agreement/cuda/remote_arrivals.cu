#include "cluster.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128) kernel(const u32* A, u32* D) {
  __shared__ u32 s[2][128];
  __shared__ __align__(8) u64 b[4];
  int i = threadIdx.x;
  u32 me = rank(), full = shared_address(b), empty = full + 16, at = shared_address(s);
  if (i == 0) {
    for (int k = 0; k < 2; ++k) {
      init(full + 8 * k, 128);
      init(empty + 8 * k, 128);
    }
    inits_visible();
  }
  cluster_sync();
  // each CTA sends to the other through two slots, and the other frees them
  u32 to = peer_address(at, me ^ 1), sent = peer_address(full, me ^ 1), freed = peer_address(empty, me ^ 1), sum = me;
  for (int k = 0; k < 7; ++k) {
    int slot = k & 1;
    u32 phase = k >> 1 & 1;
    wait(empty + 8 * slot, phase ^ 1);
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to + 512 * slot + 4 * i), "r"(A[256 * k + 128 * me + i])
                 : "memory");
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(sent + 8 * slot) : "memory");
    asm volatile(
        "{\n\t.reg .pred p;\n\tagain:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n\t"
        "@p bra done;\n\tbra again;\n\tdone:\n\t}" ::"r"(full + 8 * slot),
        "r"(phase)
        : "memory");
    sum = sum * 33 + s[slot][(i * 7) & 127];
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(freed + 8 * slot) : "memory");
    D[(7 * me + k) * 128 + i] = sum;
  }
  cluster_sync();
}

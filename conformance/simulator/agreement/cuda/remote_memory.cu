#include "cluster.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128) kernel(const u32* A, u32* D) {
  __shared__ u32 s[256];
  int i = threadIdx.x;
  u32 me = rank(), at = shared_address(s), there = peer_address(at, me ^ 1), x, y, size, id;
  s[i] = A[blockIdx.x * 128 + i];
  cluster_sync();
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(there + 4 * (127 - i)) : "memory");
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there + 512 + 4 * i), "r"(x * 5 + me) : "memory");
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  cluster_sync();
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(there + 512 + 4 * (i & 7)), "r"(x & 255)
               : "memory");
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(y) : "r"(there));
  cluster_sync();
  D[blockIdx.x * 128 + i] = s[128 + i];
  D[512 + blockIdx.x * 128 + i] = y | size << 8 | id << 16;
}

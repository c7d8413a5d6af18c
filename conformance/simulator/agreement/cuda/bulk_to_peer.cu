#include "cluster.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128) kernel(const u32* A, u32* D) {
  __shared__ __align__(128) u32 s[1024];
  __shared__ __align__(8) u64 b[2];
  int i = threadIdx.x;
  u32 me = rank(), at = shared_address(s), bar = shared_address(b);
  if (i == 0) {
    init(bar, 1);
    init(bar + 8, 1);
    inits_visible();
    arrive_expect(bar, 2048);
    arrive_expect(bar + 8, 1024);
  }
  cluster_sync();
  if (i == 0) {  // half each, to both
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 1024, [%2], "
        "%3;" ::"r"(at + 1024 * me),
        "l"(A + 256 * me), "r"(bar), "h"((u16)3)
        : "memory");
  }
  wait(bar, 0);
  for (int k = 0; k < 2; ++k) s[512 + 128 * k + i] = s[128 * k + i] + (me + 1) * s[256 + 128 * k + i];
  to_async_proxy();
  __syncthreads();
  if (i == 0) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(
                     peer_address(at + 3072, me ^ 1)),
                 "r"(at + 2048), "r"(peer_address(bar + 8, me ^ 1))
                 : "memory");
  }
  wait(bar + 8, 0);
  for (int k = 0; k < 8; ++k) D[1024 * me + 128 * k + i] = s[128 * k + i];
  cluster_sync();
}

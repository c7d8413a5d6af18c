"""``tcgen05.cp``: shared memory to tensor memory (PTX 9.7.16.9.2).

With ``cta_group::2`` each CTA of the pair copies from its own shared memory, at the address of the descriptor, to its
own tensor memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flamia.conformance.simulator.machine.asyncorder import PIPE
from flamia.conformance.simulator.machine.sharedtraffic import SharedTraffic
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.tensormemory import Operation, Operations, Region, TensorMemory
from flamia.conformance.simulator.machine.tensorpipe import TensorCores, count_unpromised
from flamia.conformance.simulator.ops.asynchronous import Mask, later, line_of, single_lane, translate
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ops.tcgen05_alloc import take_group
from flamia.conformance.simulator.tensor import movement
from flamia.conformance.simulator.tensor.descriptors import decode_tcgen05
from flamia.conformance.simulator.tensor.tmem_layout import LANES, check_columns

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.warp import Warp

_SHAPES = ("128x256b", "128x128b", "64x128b", "32x128b", "4x256b")
_MULTICAST = ("warpx2::02_13", "warpx2::01_23", "warpx4")


@op("tcgen05.cp", control=True)
def compile_cp(site: Site) -> Run:
    """``tcgen05.cp.cta_group::N.shape{.multicast} [taddr], descriptor``."""
    site.flag("cp")
    group = take_group(site)
    key = (site.take(*_SHAPES), site.take(*_MULTICAST) or None)
    if key not in movement.COPY_SHAPES:
        raise site.refuse(f"the shape {'.'.join(filter(None, key))!r} is not simulated")
    shape = movement.COPY_SHAPES[key]
    site.expect_operands(2)
    address, offset, _ = site.address(0)
    source = site.row(1, "u64")
    what = line_of(site)
    operation = Operation("cp", what)

    def run(warp: Warp, mask: Mask) -> None:
        lane = single_lane(warp, mask, what)
        cores = warp.cta.cluster.unit(TensorCores)
        cores.use_group(group, what)
        descriptor = decode_tcgen05(int(warp.rows[source][lane]))
        width = shape.row_bytes // 4
        column = check_columns(int(warp.rows[address][lane]) + offset, width, "the destination of tcgen05.cp")
        addresses = movement.copy_addresses(descriptor, shape)
        granules = np.unique(addresses >> 4)
        order = warp.order.asynchronous
        number = order.issue(PIPE)
        warp.cta.cluster.unit(Operations).add(order.entry(PIPE), number, operation)
        ctas = cores.ctas(warp, group)
        tokens, before = [], []
        for cta in ctas:
            traffic = cta.unit(SharedTraffic)
            traffic.check_range(granules, what)
            tokens.append(traffic.begin_read(warp, granules, what, number))
            region = Region.of(range(LANES), column, width)
            before += cta.unit(TensorMemory).write(warp, region, number, True, what)
        count_unpromised(warp, operation, before)
        keys = cores.begin(ctas, what)

        def copy() -> None:
            for cta, token in zip(ctas, tokens, strict=True):
                lines = cta.shared.data[addresses].view(np.uint32)
                words = cta.unit(TensorMemory).words
                for row, first in movement.copy_lanes(shape):
                    words[first : first + 32, column : column + width] = lines[row : row + 32]
                cta.shared.complete(token)
            cores.end(keys)

        later(site, warp, cores.engine(ctas), copy, what)

    return translate(run)

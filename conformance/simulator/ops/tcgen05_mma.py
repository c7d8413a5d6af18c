"""``tcgen05.mma`` (PTX 9.7.16.10): what an instruction takes, in which order it is checked, and its execution.

Dense: ``[d], a, b-desc, idesc{, {mask}}, enable{, scale}``; otherwise ``[d], a, b-desc, idesc, [sfa], [sfb], enable``.
``a`` is a descriptor or, in brackets, tensor memory. The collector buffers are hints and change nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.simulator.machine.asyncorder import PIPE
from flamia.conformance.simulator.machine.memory import Token
from flamia.conformance.simulator.machine.sharedtraffic import SharedTraffic
from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.tensormemory import Operation, Operations, Region, TensorMemory
from flamia.conformance.simulator.machine.tensorpipe import TensorCores, count_unpromised
from flamia.conformance.simulator.ops.asynchronous import Mask, later, line_of, single_lane, translate
from flamia.conformance.simulator.ops.registry import Run, op
from flamia.conformance.simulator.ops.tcgen05_alloc import take_group
from flamia.conformance.simulator.ptx.syntax import Address, Vector
from flamia.conformance.simulator.tensor import tmem_layout
from flamia.conformance.simulator.tensor.descriptors import Descriptor, decode_tcgen05
from flamia.conformance.simulator.tensor.evaluate import evaluate
from flamia.conformance.simulator.tensor.illegal import Illegal
from flamia.conformance.simulator.tensor.instruction import Instruction, decode_instruction, scales_per_row
from flamia.conformance.simulator.tensor.swizzle import operand_addresses, operand_granules

if TYPE_CHECKING:
    from flamia.conformance.simulator.machine.cta import Cta
    from flamia.conformance.simulator.machine.warp import Warp

_STEP_BYTES = 32
_KINDS = ("f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4")
_VECTORS = ("scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32")
_COLLECTOR = tuple(f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard"))
_ALL_LANES = np.ones(tmem_layout.LANES, np.bool_)
_ID_BITS = 0x3FFFFFFF  # some kernels carry the scale id in bits 30-31 of the address of the table


Reader: TypeAlias = "Callable[[Warp, int], _Product]"


@dataclass
class _Product:
    """One MMA with its operands decoded.

    :param a: descriptor, or None if A is in tensor memory at column ``a_column``.
    :param scale: power of two that D is multiplied by before the addition.
    :param lanes: rows of tensor memory that are written.
    """

    instruction: Instruction
    d: int
    a: Descriptor | None
    a_column: int
    b: Descriptor
    sfa: int
    sfb: int
    accumulate: bool
    scale: float
    lanes: NDArray[np.bool_]

    def shared_operands(self) -> list[tuple[Descriptor, int, int, bool]]:
        """Operands in the shared memory of each CTA: descriptor, rows, bytes of an element, majorness."""
        i = self.instruction
        b = (self.b, i.n // i.cta_group, max(i.b.bits // 8, 1), i.b_mn_major)
        if self.a is None:
            return [b]
        return [(self.a, i.rows_per_cta, max(i.a.bits // 8, 1), i.a_mn_major), b]

    def reads(self) -> list[Region]:
        """Regions of tensor memory that each CTA reads, D included where it is accumulated."""
        i, regions = self.instruction, []
        if self.accumulate:
            regions.append(self.writes())
        if self.a is None:
            regions.append(_rows(i, self.a_column, tmem_layout.operand_columns(i)))
        if i.block_scaled:
            everywhere = range(tmem_layout.LANES)
            regions.append(Region.of(everywhere, self.sfa, tmem_layout.scale_words(i.rows_per_cta)))
            regions.append(Region.of(everywhere, self.sfb, _sfb_words(i)))
        return regions

    def writes(self) -> Region:
        """The region of D."""
        return _rows(self.instruction, self.d, tmem_layout.accumulator_columns(self.instruction))


def _rows(instruction: Instruction, column: int, width: int) -> Region:
    every_other = instruction.m == 64 and instruction.cta_group == 1
    return Region(slice(0, 8, 2 if every_other else 1), slice(column, column + width))


def _sfb_words(instruction: Instruction) -> int:
    split = tmem_layout.is_split(instruction)
    return tmem_layout.scale_words(instruction.n // 2 if split else instruction.n)


@op("tcgen05.mma", control=True)
def compile_mma(site: Site) -> Run:
    """One thread issues the product; it is executed in the order of Note [Pipelined pairs]."""
    site.flag("mma")
    group = take_group(site)
    kind = site.take(*(f"kind::{k}" for k in _KINDS)).removeprefix("kind::")
    scaled = site.flag("block_scale")
    vector = site.take(*_VECTORS).removeprefix("scale_vec::") or None
    site.take(*_COLLECTOR)
    if scaled != kind.startswith("mx"):
        raise site.refuse("the mx kinds have .block_scale, exactly")
    if scaled:
        translate(scales_per_row)(kind, vector)
    read = _compile_operands(site, kind, group, scaled, vector)
    what = line_of(site)

    def run(warp: Warp, mask: Mask) -> None:
        lane = single_lane(warp, mask, what)
        cores = warp.cta.cluster.unit(TensorCores)
        cores.use_group(group, what)
        product = read(warp, lane)
        i = product.instruction
        operation = Operation("mma", what, (product.d, i.m, i.n, group))
        order = warp.order.asynchronous
        number = order.issue(PIPE)
        warp.cta.cluster.unit(Operations).add(order.entry(PIPE), number, operation)
        ctas = cores.ctas(warp, group)
        tokens = [token for cta in ctas for token in _take(warp, cta, product, number, operation)]
        keys = cores.begin(ctas, what)
        fast = warp.machine.fast_mma

        def execute() -> None:
            _execute(product, ctas, fast)
            for token in tokens:
                token.space.complete(token)
            cores.end(keys)

        later(site, warp, cores.engine(ctas), execute, what)

    return translate(run)


def _compile_operands(site: Site, kind: str, group: int, scaled: bool, vector: str | None) -> Reader:
    """A closure that reads and decodes the operands of one thread."""
    d, a, b, idesc = site.address(0), site.operand(1), site.row(2, "u64"), site.row(3, "u32")
    a_in_tmem = isinstance(a, Address)
    a_row, a_offset = site.address(1)[:2] if a_in_tmem else (site.row(1, "u64"), 0)
    rest = list(site.operands[4:])
    tables: list[tuple[int, int]] = []
    disable: list[int] = []
    if scaled:
        site.expect_operands(7)
        tables = [site.address(i)[:2] for i in (4, 5)]
        rest = rest[2:]
    elif rest and isinstance(rest[0], Vector):
        disable = [site.row(item, "u32") for item in site.items(rest.pop(0))]
        if len(disable) != 4 * group:
            raise site.refuse(f"the lane mask has {4 * group} words, got {len(disable)}")
    enable, negated = site.predicate(rest[0])
    scale = 0
    if len(rest) == 2 and kind in ("f16", "tf32"):
        scale = site.integer(rest[1])
        if not 0 <= scale <= 15:
            raise site.refuse(f"scale-input-d must be in 0..15, got {scale}")
    elif len(rest) != 1:
        raise site.refuse("too many operands")

    def read(warp: Warp, lane: int) -> _Product:
        rows = warp.rows
        i = decode_instruction(int(rows[idesc][lane]), kind, group, vector)
        columns = tmem_layout.check_columns(
            int(rows[d[0]][lane]) + d[1], tmem_layout.accumulator_columns(i), "D of tcgen05.mma"
        )
        a_value = int(rows[a_row][lane]) + a_offset
        a_column = 0
        if a_in_tmem:
            if i.a_mn_major:
                raise Illegal("majorness", "A in tensor memory must be K-major, got MN-major")
            a_column = tmem_layout.check_columns(a_value, tmem_layout.operand_columns(i), "A of tcgen05.mma")
        sfa = sfb = 0
        if scaled:
            sfa, sfb = (int(rows[row][lane]) + offset & _ID_BITS for row, offset in tables)
            sfa = tmem_layout.check_columns(sfa, tmem_layout.scale_words(i.rows_per_cta), "the scales of A")
            sfb = tmem_layout.check_columns(sfb, _sfb_words(i), "the scales of B")
        lanes = _ALL_LANES
        if disable:
            words = np.array([rows[row][lane] for row in disable], np.uint32).view(np.uint8)
            lanes = ~np.unpackbits(words, bitorder="little").astype(np.bool_)
        return _Product(
            instruction=i,
            d=columns,
            a=None if a_in_tmem else decode_tcgen05(a_value),
            a_column=a_column,
            b=decode_tcgen05(int(rows[b][lane])),
            sfa=sfa,
            sfb=sfb,
            accumulate=bool(rows[enable][lane]) != negated,
            scale=2.0**-scale,
            lanes=lanes,
        )

    return read


def _take(warp: Warp, cta: Cta, product: _Product, number: int, operation: Operation) -> list[Token]:
    """Check the operands in one CTA, and mark them as used. :raises Fault: for what may not be used."""
    what = operation.label
    traffic, memory = cta.unit(SharedTraffic), cta.unit(TensorMemory)
    granules = []
    for descriptor, rows, element_bytes, mn_major in product.shared_operands():
        found = operand_granules(descriptor, rows, _STEP_BYTES, element_bytes, mn_major)
        traffic.check_range(found, what)
        granules.append(found)
    before = [o for region in product.reads() for o in memory.read(warp, region, number, True, what)]
    before += memory.write(warp, product.writes(), number, True, what)
    count_unpromised(warp, operation, before)
    return [traffic.begin_read(warp, found, what, number) for found in granules]


def _execute(product: _Product, ctas: list[Cta], fast: bool) -> None:
    """Compute D in every CTA from the memories as they are now."""
    i = product.instruction
    b_rows = i.n // i.cta_group
    at = operand_addresses(product.b, b_rows, _STEP_BYTES, max(i.b.bits // 8, 1), i.b_mn_major)
    b = np.concatenate([cta.shared.data[at] for cta in ctas]) if len(ctas) > 1 else ctas[0].shared.data[at]
    for part, cta in enumerate(ctas):
        words = cta.unit(TensorMemory).words
        if product.a is None:
            a = tmem_layout.read_operand(words, product.a_column, i)
        else:
            a = cta.shared.data[
                operand_addresses(product.a, i.rows_per_cta, _STEP_BYTES, max(i.a.bits // 8, 1), i.a_mn_major)
            ]
        sfa = sfb = None
        if i.block_scaled:
            sfa = tmem_layout.read_scales(words, product.sfa, i.rows_per_cta, i.sfa_id, i.scales, "A")
            split = tmem_layout.is_split(i)
            sfb = tmem_layout.read_scales(words, product.sfb, i.n, i.sfb_id, i.scales, "B", split)
        acc = None
        if product.accumulate:
            acc = tmem_layout.read_accumulator(words, product.d, i) * np.float32(product.scale)
        result = evaluate(i, a, b, acc, sfa, sfb, fast=fast)
        enabled = None if product.lanes is _ALL_LANES else product.lanes[128 * part : 128 * part + 128]
        tmem_layout.write_accumulator(words, product.d, i, result, enabled)

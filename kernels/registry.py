"""The kernels, as literals: what each is compiled from, for what, and what it may cost.

A `Kernel` is one source file with parameters; a `Unit` is the kernel with a value for each parameter, which is
what is compiled, cached and loaded. `Kernel.units` are the released ones, which ``flamia kernels build`` builds
and the tests hold to their limits; `Kernel.unit` makes others on demand.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from flamia.kernels import structs
from flamia.kernels.targets import SM_90A, SM_100A, SM_103A, TARGETS, Target

SOURCES = Path(__file__).resolve().parent / "cuda"
"""Folder of the CUDA C++ sources; ``#include "..."`` is relative to it."""

OPTIONS = (
    "--std=c++17",
    "--fmad=false",  # an FMA happens where the contract has one, and nowhere else
    "--generate-line-info",
    "--ptxas-options=-v",  # registers and spills, into the log
    "--no-cache",  # NVRTC's own cache beside a driver: its hits have no log
)
"""Options of every compilation. Subnormals are kept and divisions are exact: NVRTC's defaults."""


@dataclass(frozen=True)
class Entry:
    """One ``__global__`` function, and the limits that a build is held to.

    :param name: as the source spells it (``extern "C"``).
    :param threads: per CTA, its ``__launch_bounds__``; where the source has several, by its parameters, all of them.
    :param max_registers: per thread.
    :param spills: bytes of local memory per thread, spilled registers and indexed arrays together.
    :param targets: those of the kernel's that have it.
    """

    name: str
    threads: tuple[int, ...]
    max_registers: int
    spills: int = 0
    targets: tuple[Target, ...] = TARGETS


@dataclass(frozen=True)
class Parameter:
    """A macro that a source is specialised by.

    :param macro: name in the source.
    :param label: prefix of a value in the names of units.
    :param values: the released values; a string becomes the macro ``<MACRO>_IS_<VALUE>``.
    :param also: values of units that are not released: variants for tests and measurements.
    :param any_multiple_of: further integers that `Kernel.unit` accepts: multiples of this up to ``maximum``.
    """

    macro: str
    label: str
    values: tuple[int | str, ...]
    also: tuple[int | str, ...] = ()
    any_multiple_of: int = 0
    maximum: int = 0

    def accepts(self, value: int | str) -> bool:
        """Whether a unit may have this value."""
        if value in self.values or value in self.also:
            return True
        return (
            isinstance(value, int)
            and self.any_multiple_of > 0
            and 0 < value <= self.maximum
            and value % self.any_multiple_of == 0
        )


@dataclass(frozen=True)
class Kernel:
    """One source file and what it is compiled to.

    :param name: what users type.
    :param summary: one line for tables.
    :param source: path under `SOURCES`.
    :param params: bytes of the struct that each entry takes by value, checked by the source.
    :param seconds: about what one core takes to compile a unit, so that the longest can be started first.
    """

    name: str
    summary: str
    source: str
    params: int
    entries: tuple[Entry, ...]
    parameters: tuple[Parameter, ...] = ()
    targets: tuple[Target, ...] = TARGETS
    seconds: float = 0.5

    @property
    def units(self) -> tuple[Unit, ...]:
        """The kernel with every combination of released values."""
        choices = itertools.product(*(p.values for p in self.parameters))
        return tuple(Unit(self, values) for values in choices)

    def unit(self, **values: int | str) -> Unit:
        """The kernel with these values, by label.

        :raises ValueError: for a value that the parameter does not accept.
        """
        chosen = []
        for p in self.parameters:
            value = values.pop(p.label)
            if not p.accepts(value):
                further = f" or a multiple of {p.any_multiple_of} up to {p.maximum}" if p.any_multiple_of else ""
                raise ValueError(f"{p.label} must be one of {p.values + p.also}{further}, got {value!r}")
            chosen.append(value)
        if values:
            raise ValueError(f"{self.name} has no parameter {sorted(values)}")
        return Unit(self, tuple(chosen))

    def entries_of(self, target: Target) -> tuple[Entry, ...]:
        """The entries that a build for this target has."""
        return tuple(e for e in self.entries if target in e.targets)

    def entry(self, name: str) -> Entry:
        """The entry of that name.

        :raises ValueError: if there is none.
        """
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise ValueError(f"{self.name} has no entry {name!r}; it has {[e.name for e in self.entries]}")


@dataclass(frozen=True)
class Unit:
    """A kernel and the values of its parameters: one translation unit."""

    kernel: Kernel
    values: tuple[int | str, ...] = ()

    @property
    def name(self) -> str:
        """For example ``quantize[bf16,d128]``."""
        labels = [
            v if isinstance(v, str) else f"{p.label[0]}{v}"
            for p, v in zip(self.kernel.parameters, self.values, strict=True)
        ]
        return self.kernel.name + (f"[{','.join(labels)}]" if labels else "")

    @property
    def defines(self) -> tuple[str, ...]:
        """Macro definitions, as options of NVRTC."""
        out = [f"--define-macro=PARAMS_BYTES={self.kernel.params}"]
        for p, value in zip(self.kernel.parameters, self.values, strict=True):
            text = f"{p.macro}_IS_{value.upper()}=1" if isinstance(value, str) else f"{p.macro}={value}"
            out.append(f"--define-macro={text}")
        return tuple(out)

    def source(self) -> str:
        """Text of the source file."""
        return (SOURCES / self.kernel.source).read_text(encoding="utf-8")

    def headers(self) -> dict[str, str]:
        """Text of every file that the source includes, directly or not, by its name in ``#include "..."``."""
        found: dict[str, str] = {}
        waiting = [self.source()]
        while waiting:
            for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', waiting.pop(), re.MULTILINE):
                if name not in found:
                    found[name] = (SOURCES / name).read_text(encoding="utf-8")
                    waiting.append(found[name])
        return dict(sorted(found.items()))


ELEMENT = Parameter("ELEMENT", "element", ("bf16", "fp16", "fp32"))
HEAD_DIM = Parameter("HEAD_DIM", "dim", (64, 128), any_multiple_of=32, maximum=256)

SCHEDULE = Kernel(
    name="schedule",
    summary="tile table and work items of a pack, longest first, from cu_seqlens",
    source="quantize/schedule.cu",
    params=structs.SCHEDULE.itemsize,
    entries=(Entry("build_schedule", threads=(1024,), max_registers=64),),
)

QUANTIZE = Kernel(
    name="quantize",
    summary="q, k, v to payload and scale tiles: token blocks of 1 and 32, NVFP4",
    source="quantize/quantize.cu",
    params=structs.QUANTIZE.itemsize,
    entries=(
        Entry("quantize", threads=(256, 512), max_registers=96),
        Entry("quantize_nvfp4", threads=(256, 512), max_registers=128),
        Entry("quantize_wide", threads=(256, 512), max_registers=128, targets=(SM_90A,)),
    ),
    parameters=(ELEMENT, HEAD_DIM),
)

ROW_PASS = Kernel(
    name="row_pass",
    summary="backward pre-pass: dout, out, l to quantized dout / l and delta",
    source="quantize/row_pass.cu",
    params=structs.ROW_PASS.itemsize,
    entries=(
        Entry("row_pass", threads=(256, 512), max_registers=112),
        Entry("row_pass_wide", threads=(256, 512), max_registers=128, targets=(SM_90A,)),
        Entry("row_pass_unscaled", threads=(256, 512), max_registers=112, targets=(SM_90A,)),
    ),
    parameters=(ELEMENT, HEAD_DIM),
)

EPILOGUE = Kernel(
    name="epilogue",
    summary="FP32 tiles to gradients: sum over a group of heads, undone exponents, padding rows cleared",
    source="quantize/epilogue.cu",
    params=structs.EPILOGUE.itemsize,
    entries=(Entry("reduce_heads", threads=(256,), max_registers=64),),
    parameters=(ELEMENT,),
)

DECODE = Kernel(
    name="decode",
    summary="payload and scale tiles back to FP32 tokens, for debugging",
    source="quantize/decode.cu",
    params=structs.DECODE.itemsize,
    entries=(
        Entry("decode_tokens", threads=(256,), max_registers=64),
        Entry("decode_nvfp4", threads=(256,), max_registers=64),
    ),
)

FORMATS = Kernel(
    name="formats",
    summary="every conversion of formats.cuh over an array, native and in software, for tests",
    source="quantize/formats.cu",
    params=structs.FORMATS.itemsize,
    entries=(Entry("convert", threads=(256,), max_registers=64),),
)

HOPPER_DIM = Parameter("HEAD_DIM", "dim", (64, 128))
RECIPE = Parameter("RECIPE", "recipe", ("mxfp8",), also=("bf16",))  # BF16: to measure what the numerics cost

HOPPER_FACTORS = Kernel(
    name="hopper_factors",
    summary="what a key tile of an unscaled recipe tells beside its payload",
    source="hopper/factors.cu",
    params=structs.HOPPER_FACTORS.itemsize,
    entries=(Entry("make_factors", threads=(256,), max_registers=64),),
    targets=(SM_90A,),
)

HOPPER_PACK = Kernel(
    name="hopper_pack",
    summary="q, k, v of an unscaled recipe to bfloat16 tiles",
    source="hopper/pack.cu",
    params=structs.HOPPER_PACK.itemsize,
    entries=(Entry("pack_tokens", threads=(256, 512), max_registers=80),),
    parameters=(ELEMENT, HOPPER_DIM),
    targets=(SM_90A,),
)

HOPPER_FORWARD = Kernel(
    name="hopper_forward",
    summary="attention forward on Hopper",
    source="hopper/forward.cu",
    params=structs.HOPPER_FORWARD.itemsize,
    entries=(Entry("attention_forward", threads=(384,), max_registers=168),),
    parameters=(RECIPE, HOPPER_DIM),
    targets=(SM_90A,),
    seconds=2.0,
)

WIDENS = Parameter("WIDENS", "widens", (0, 1))  # Note [Widening] of hopper/backward.cuh

HOPPER_BACKWARD_OPERANDS = Kernel(
    name="hopper_backward_operands",
    summary="attention backward on Hopper: what a step needs of its rows beside, and q as bfloat16 tiles",
    source="hopper/backward_operands.cu",
    params=structs.HOPPER_BACKWARD.itemsize,
    entries=(Entry("backward_operands", threads=(128, 256), max_registers=64),),
    parameters=(RECIPE, HOPPER_DIM, WIDENS),
    targets=(SM_90A,),
)

HOPPER_BACKWARD_KEYS = Kernel(
    name="hopper_backward_keys",
    summary="attention backward on Hopper: dK and dV",
    source="hopper/backward_keys.cu",
    params=structs.HOPPER_BACKWARD.itemsize,
    entries=(Entry("backward_keys", threads=(384,), max_registers=168),),
    parameters=(RECIPE, ELEMENT, HOPPER_DIM, WIDENS),
    targets=(SM_90A,),
    seconds=1.0,
)

HOPPER_BACKWARD_DQ = Kernel(
    name="hopper_backward_dq",
    summary="attention backward on Hopper: dQ from stored tiles of X",
    source="hopper/backward_dq.cu",
    params=structs.HOPPER_BACKWARD.itemsize,
    entries=(Entry("backward_dq", threads=(640, 544), max_registers=96),),
    parameters=(RECIPE, ELEMENT, HOPPER_DIM),
    targets=(SM_90A,),
)

BLACKWELL_FORWARD = Kernel(
    name="blackwell_forward",
    summary="attention forward on Blackwell",
    source="blackwell/forward.cu",
    params=structs.BLACKWELL_FORWARD.itemsize,
    entries=(Entry("attention_forward", threads=(512,), max_registers=128),),
    parameters=(
        Parameter("RECIPE", "recipe", ("mxfp8", "nvfp4_fp8")),
        Parameter("HEAD_DIM", "dim", (64, 128)),
        Parameter("EXP2", "exp2", ("exact",), also=("hardware",)),
        Parameter("STRICT", "strict", (0,), also=(1,)),
        Parameter("HOOKS", "hooks", (0,), also=(1,)),
    ),
    targets=(SM_100A, SM_103A),
    seconds=0.8,
)

BLACKWELL_BACKWARD = Kernel(
    name="blackwell_backward",
    summary="attention backward on Blackwell: dK and dV (keys), dQ (queries)",
    source="blackwell/backward.cu",
    params=structs.BLACKWELL_BACKWARD.itemsize,
    entries=(Entry("attention_backward", threads=(384,), max_registers=168),),
    parameters=(
        Parameter("OWNER", "owner", ("keys", "queries")),
        Parameter("RECIPE", "recipe", ("mxfp8", "nvfp4_fp8")),
        Parameter("HEAD_DIM", "dim", (64, 128)),
        Parameter("EXP2", "exp2", ("exact",), also=("hardware",)),
        Parameter("STRICT", "strict", (0,), also=(1,)),
        Parameter("HOOKS", "hooks", (0,), also=(1,)),
    ),
    targets=(SM_100A, SM_103A),
    seconds=1.5,
)

BLACKWELL_DQ = Kernel(
    name="blackwell_dq",
    summary="attention backward on Blackwell: dQ from stored tiles of X",
    source="blackwell/dq.cu",
    params=structs.BLACKWELL_BACKWARD.itemsize,
    entries=(Entry("attention_dq", threads=(256,), max_registers=128),),
    parameters=(Parameter("HEAD_DIM", "dim", (64, 128)),),
    targets=(SM_100A, SM_103A),
)

KERNELS = (
    *(SCHEDULE, QUANTIZE, ROW_PASS, EPILOGUE, DECODE, FORMATS),
    *(HOPPER_FACTORS, HOPPER_PACK, HOPPER_FORWARD),
    *(HOPPER_BACKWARD_OPERANDS, HOPPER_BACKWARD_KEYS, HOPPER_BACKWARD_DQ),
    BLACKWELL_FORWARD,
    BLACKWELL_BACKWARD,
    BLACKWELL_DQ,
)
"""Every kernel."""


def get_kernel(name: str) -> Kernel:
    """The kernel of that name.

    :raises ValueError: if there is none.
    """
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    raise ValueError(f"kernel must be one of {[k.name for k in KERNELS]}, got {name!r}")


def find_units(names: list[str] | tuple[str, ...] = ()) -> tuple[Unit, ...]:
    """Units by name; all released ones for no names.

    A name is that of a kernel, for its released units; or of a unit, released or not (``quantize[bf16,d96]``). A
    ``*`` stands for any characters (``blackwell_*``), and finds released units.

    :raises ValueError: for a name that is none of these.
    """
    everything = tuple(u for k in KERNELS for u in k.units)
    if not names:
        return everything
    out: list[Unit] = []
    for name in names:
        pattern = re.compile(re.escape(name).replace(r"\*", ".*"))
        chosen = [u for u in everything if pattern.fullmatch(u.name) or pattern.fullmatch(u.kernel.name)]
        out += [u for u in chosen or [_parse_unit(name)] if u not in out]
    return tuple(out)


def _parse_unit(name: str) -> Unit:
    """The unit of that name, see `Unit.name`."""
    kernel_name, bracket, labels = name.partition("[")
    kernel = next((k for k in KERNELS if k.name == kernel_name), None)
    texts = labels.removesuffix("]").split(",")
    if kernel is None or not bracket or not labels.endswith("]") or len(texts) != len(kernel.parameters):
        names = [k.name for k in KERNELS]
        example = next(u.name for k in KERNELS for u in k.units if u.values)
        raise ValueError(f"kernel must be one of {names} or a unit such as {example!r}, got {name!r}")
    values: dict[str, int | str] = {}
    for p, text in zip(kernel.parameters, texts, strict=True):
        number = text.removeprefix(p.label[0])
        is_number = isinstance(p.values[0], int) and number != text and number.isdecimal()
        values[p.label] = int(number) if is_number else text
    return kernel.unit(**values)

"""Instructions whose bits PTX leaves to the chip.

Note [Approximate]
~~~~~~~~~~~~~~~~~~
``ex2.approx``, ``lg2.approx``, ``rcp.approx``, ``rsqrt.approx``, ``sqrt.approx``, ``sin``, ``cos``, ``tanh`` and
``div.{approx,full}`` are tables and interpolations that PTX bounds but does not define. The stand-in is the float64
function of the C library, rounded to nearest; special values are those of the PTX tables. Registers that may depend on
such a result are found before the run (`machine.taint`), and a report counts the bytes of each buffer that were stored
from them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flamia.conformance.simulator.machine.site import Site
from flamia.conformance.simulator.machine.types import Row
from flamia.conformance.simulator.ops.floating import finish, store_float
from flamia.conformance.simulator.ops.halves import halves_function
from flamia.conformance.simulator.ops.registry import Run, op

FUNCTIONS: dict[str, Callable[..., Row]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1.0 / a,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "div": np.divide,
}


def _wide(name: str) -> Callable[..., Row]:
    function = FUNCTIONS[name]
    return lambda *values: function(*[v.astype(np.float64) for v in values]).astype(np.float32)


@op(
    "ex2.approx",
    "lg2.approx",
    "rcp.approx",
    "rsqrt.approx",
    "sqrt.approx",
    "sin.approx",
    "cos.approx",
    "tanh.approx",
    "div.approx",
    "div.full",
    types=("f32", "f16", "f16x2", "bf16", "bf16x2"),
)
def compile_approximate(site: Site) -> Run:
    """``op.approx{.ftz}.f32`` and, for ex2 and tanh, of halves: Note [Approximate]."""
    name = site.instruction.base
    kind = site.take_type("f32", "f16", "f16x2", "bf16", "bf16x2")
    site.take("approx", "full")
    ftz = site.flag("ftz")
    count = 2 if name == "div" else 1
    site.expect_operands(count + 1)
    if kind != "f32":
        if name not in ("ex2", "tanh"):
            raise site.refuse(f"{name} of {kind}")
        return halves_function(site, kind, FUNCTIONS[name], 1)
    sources = tuple(site.row(i, kind) for i in range(1, count + 1))
    return store_float(site.target(0, kind), finish(_wide(name), ftz, False), sources, False)

"""What training keeps per token between the forward and the backward, against a bfloat16 flash attention."""

from __future__ import annotations

from dataclasses import dataclass

from flamia.reference import Recipe, Scaling
from flamia.reference.operands import stored_bits

OUT_BYTES = 2
"""out stays in bfloat16."""


@dataclass(frozen=True)
class Memory:
    """Bytes per token, all heads together, that the backward of one recipe reads.

    :param copies: by tensor (``q``, ``k``, ``v``): the scalings it is kept in, once each.
    :param parts: bytes by what they hold: ``q``, ``k``, ``v``, ``out``, ``rows`` (m and l, or the LSE).
    :param baseline: bytes of flash attention: q, k, v and out in bfloat16, and one float32 LSE per row.
    """

    recipe: str
    copies: dict[str, list[Scaling]]
    parts: dict[str, float]
    baseline: float

    @property
    def total(self) -> float:
        """Bytes per token."""
        return sum(self.parts.values())

    @property
    def ratio(self) -> float:
        """Of the bytes of flash attention."""
        return self.total / self.baseline


def kept_copies(recipe: Recipe) -> dict[str, list[Scaling]]:
    """The scalings in which the backward reads q, k and v. A copy that only the forward reads is not kept."""
    scores_and_tokens = [recipe.scores, recipe.gradient_qk]
    if recipe.gradient_values is not None:
        values = [recipe.gradient_values]
    else:
        values = [recipe.values] + ([recipe.diagonal_values] if recipe.diagonal_values is not None else [])
    return {name: list(dict.fromkeys(x)) for name, x in zip("qkv", (*[scores_and_tokens] * 2, values), strict=True)}


def measure_memory(recipe: Recipe, num_q_heads: int, num_kv_heads: int, head_dim: int) -> Memory:
    """Count what causal attention keeps.

    A recipe that normalises P in the backward needs one number per row, the LSE; one that normalises dO needs two, m
    and l.
    """
    copies = kept_copies(recipe)
    heads = {"q": num_q_heads, "k": num_kv_heads, "v": num_kv_heads}
    parts = {name: heads[name] * sum(stored_bits(s, head_dim) for s in copies[name]) / 8 for name in heads}
    parts["out"] = float(OUT_BYTES * num_q_heads * head_dim)
    parts["rows"] = float((4 if recipe.normalize == "p" else 8) * num_q_heads)
    baseline = 2 * head_dim * (2 * num_q_heads + 2 * num_kv_heads) + 4 * num_q_heads
    return Memory(recipe.name, copies, parts, float(baseline))

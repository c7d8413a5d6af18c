"""Stages: the intermediate results that an implementation may return, and what the reference says they are.

Note [Stages]
~~~~~~~~~~~~~
*Arrays*, compared at level 1 unless said otherwise. ``{role}`` is q, k, v (V32), v1 (V1), q_tokens, k_tokens (where
they are another copy than q and k: the NVFP4 recipe) or dout (dO / l):

=================================  ==================================================================================
``{role}.payload``                 element codes uint8 ``(T, H, D)``; bfloat16 for an unscaled recipe
``{role}.scale``                   E8M0 bytes ``(T, H)``, the byte of each token's block; NVFP4: UE4M3 ``(T, H, D/16)``
``{role}.payload_tiles``           uint8 ``(H, tiles, 128 R)``, `layout.pack_payload` or `layout.pack_nvfp4`
``{role}.scale_tiles``             uint8 ``(H, tiles, 512 n)``, `layout.pack_scales` for channels, or NVFP4's
``{role}.scale_tiles_tokens``      uint8 ``(H, tiles, 512 n)``, `layout.pack_scales` for tokens (v, dout)
``schedule.forward``               int64 ``(items, 4)``: document, head, tile, cost
``schedule.backward``              likewise
``m``, ``l``                       level 2: float32 ``(Hq, T)``
``delta``                          level 3: float32 ``(Hq, T)``
=================================  ==================================================================================

*Tiles*, by (document, query head, query tile, key tile). Only rows and columns of existing tokens are compared:

====================================  ================================================================================
``forward.p``                         level 2: E4M3 codes uint8 ``[128 keys, 128 queries]``
``forward.p_top``                     level 2: the integers m_t, float32 ``[128 queries]``
``backward.p``, ``backward.ds``       level 3: E4M3 codes uint8 ``[128 keys, 128 queries]``
``backward.p_scale``, ``.ds_scale``   level 3: E8M0 bytes ``[4 key blocks, 4 query blocks]``
====================================  ================================================================================

Under Note [Own exponents] of `flamia.reference.profiles` v is V1, P and dS are bfloat16 numbers instead of codes,
``p_top`` is the row's M, P is in units of ``2^(M - 8)`` in both passes, and dS has no scale.

The sign of a zero of the backward's tiles and the scale of 32x32 numbers that are all zero show in no product, and are
not compared.

*Plan*, for documents of any size, without tensors: ``tile_offsets`` (int64, documents + 1), ``payload_offsets`` and
``scale_offsets`` (int64 ``(Hkv, tiles)``, byte offset of every tile of k), and both schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.conformance.calls import Array, Inputs, Results, TileKey

LEVEL_OF_ARRAY = {"m": 2, "l": 2, "delta": 3}
"""Level at which an array is compared, where it is not 1."""

LEVEL_OF_TILE = {
    "forward.p": 2,
    "forward.p_top": 2,
    "backward.p": 3,
    "backward.p_scale": 3,
    "backward.ds": 3,
    "backward.ds_scale": 3,
}
"""Level at which a tile stage is compared."""

TOKEN_AXES = {"payload": 0, "scale": 0, "m": 1, "l": 1, "delta": 1}
"""Axis that runs over packed tokens, by the last part of an array's name."""


class ReferenceEngine:
    """The reference's functions, from ``flamia.reference`` or from a copy of that package under another name."""

    def __init__(self, package: str = "flamia.reference") -> None:
        self.package = package

    def __getattr__(self, name: str) -> Any:
        return import_module(f"{self.package}.{name}")

    def run(self, inputs: Inputs, recipe: Any, profile: str, *, backward: bool = True, stages: bool = False) -> Results:
        """One call of the reference.

        :param recipe: a name, or a `Recipe` of the same package.
        """
        tiles: dict[str, dict[TileKey, Array]] = {name: {} for name in LEVEL_OF_TILE} if stages else {}
        i = inputs
        forward = self.forward.attention_forward(
            i.q,
            i.k,
            i.v,
            i.cu_seqlens,
            recipe=recipe,
            profile=profile,
            causal=i.causal,
            softmax_scale=i.softmax_scale,
            observer=self._observer("forward", tiles, profile) if stages else None,
        )
        gradients: Any = None
        if backward:
            look = self._observer("backward", tiles, profile) if stages else None
            gradients = self.backward.attention_backward(i.dout, forward, observer=look)
        arrays = self._arrays(i, forward, backward) if stages else {}
        grads = {} if gradients is None else {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}
        return Results(forward.out, forward.lse, **grads, arrays=arrays, tiles=tiles)

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array]:
        """Note [Stages], plan."""
        offsets = self.layout.tile_offsets(cu_seqlens)
        hq, hkv = heads
        index = np.arange(hkv)[:, None] * int(offsets[-1]) + np.arange(offsets[-1])
        scale_bytes = self.layout.SCALE_TILE_BYTES * -(-dim // self.documents.TILE)
        return {
            "tile_offsets": offsets,
            "payload_offsets": index * (self.documents.TILE * dim),
            "scale_offsets": index * scale_bytes,
            **self._schedules(cu_seqlens, hq, hkv, causal),
        }

    def _schedules(self, cu: NDArray[np.int64], hq: int, hkv: int, causal: bool) -> dict[str, Array]:
        forward = self.schedule.forward_schedule(cu, hq, causal)
        backward = self.schedule.backward_schedule(cu, hkv, hq // hkv, causal)
        return {
            f"schedule.{name}": np.stack([s.document, s.head, s.tile, s.cost], axis=-1).astype(np.int64)
            for name, s in (("forward", forward), ("backward", backward))
        }

    def _arrays(self, inputs: Inputs, forward: Any, backward: bool) -> dict[str, Array]:
        found: dict[str, Array] = {"m": forward.m, "l": forward.l}
        operands: dict[str, Any] = dict(forward.operands)
        if backward:
            rows = self.backward.row_pass(inputs.dout, forward)
            operands |= rows.dout
            found["delta"] = rows.delta
        seen: set[int] = set()
        for role, operand in operands.items():
            if id(operand) in seen:
                continue
            seen.add(id(operand))
            found |= self._operand_arrays(role, operand, inputs)
        found |= self._schedules(inputs.cu_seqlens, *inputs.head_counts, inputs.causal)
        return found

    def _operand_arrays(self, role: str, operand: Any, inputs: Inputs) -> dict[str, Array]:
        found: dict[str, Array] = {f"{role}.payload": operand.payload}
        if operand.scale is None:
            return found
        found[f"{role}.scale"] = operand.scale
        cu, dim = inputs.cu_seqlens, inputs.head_dim
        layout, kind = self.layout, operand.scaling.name
        if kind == "NVFP4":
            if dim % 64 == 0:
                found[f"{role}.payload_tiles"] = layout.pack_nvfp4(operand.payload, cu)
                found[f"{role}.scale_tiles"] = layout.pack_nvfp4_scales(operand.scale, cu)
            return found
        found[f"{role}.payload_tiles"] = layout.pack_payload(operand.payload.view(np.uint8), cu)
        found[f"{role}.scale_tiles"] = layout.pack_scales(operand.scale, cu, dim)
        if kind == "TOKEN_BLOCK":
            found[f"{role}.scale_tiles_tokens"] = layout.pack_scales(operand.scale, cu, dim, "tokens")
        return found

    def _observer(self, which: str, tiles: dict[str, dict[TileKey, Array]], profile: str) -> Any:
        own = self.profiles.get_profile(profile).own_exponents
        encode, e4m3 = self.formats.encode, self.formats.E4M3

        def keep(x: Array) -> Array:
            return x.astype(bfloat16) if own else encode(np.ascontiguousarray(x), e4m3)

        def look(stage: str, document: Any, heads: slice, query_tile: int, key_tile: int, x: Array) -> None:
            name = f"{which}.{stage}"
            if name not in tiles:
                return
            kept = keep(x) if stage in ("p", "ds") else x.copy()
            for offset in range(len(kept)):
                tiles[name][document.index, heads.start + offset, query_tile, key_tile] = kept[offset]

        return look

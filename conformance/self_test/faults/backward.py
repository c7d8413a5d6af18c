"""Faults of the backward pass: the row pre-pass, P and dS, and the three gradients."""

from __future__ import annotations

from flamia.conformance.self_test.copies import Edit
from flamia.conformance.self_test.fault import Fault, accuracy, bits, promise

FAULTS = (
    Fault(
        "delta-from-unquantized-dout",
        "delta is the sum of dO times out, while dP is formed from the quantized dO.",
        kills=(bits(3, "values/gaussian"),),
        edits=(Edit("recipes", 'delta: str = "quantized"', 'delta: str = "unquantized"'),),
        bug_class="backward-p",
    ),
    Fault(
        "delta-left-out",
        "dS is P times dP, without delta: the softmax's normalisation is not differentiated.",
        kills=(promise("values/gaussian", "shift"), bits(3, "values/gaussian"), accuracy("values/gaussian")),
        edits=(Edit("backward", "ds -= self.delta[..., None, queries]", ""),),
    ),
    Fault(
        "raw-p-in-dv",
        "dV multiplies P before it is rounded, the forward multiplied it after.",
        kills=(bits(3, "values/gaussian"),),
        edits=(
            Edit(
                "backward",
                "codes = pr.quantize(p.reshape(blocks.shape)",
                """raw = pr.shift(p.copy().reshape(blocks.shape), blocks - above[..., None, :] + 8).reshape(p.shape)
codes = pr.quantize(p.reshape(blocks.shape)""",
            ),
            Edit(
                "backward",
                "return Computed(codes, _per_row(scale), wide",
                """_select(raw, hidden)
wide = _by_square(raw, decode_e8m0(scale)).astype(np.float64)
return Computed(raw, _per_row(scale), wide""",
            ),
        ),
        bug_class="backward-p",
    ),
    Fault(
        "backward-p-of-another-exponential",
        "The backward recomputes P with another 2^x than the forward.",
        kills=(promise("values/gaussian", "consistency"), bits(3, "values/gaussian")),
        edits=(
            Edit(
                "backward",
                "r, p = pr.exponential(scores, self.constant) blocks",
                """x = np.maximum(scores * self.constant, pr.LOWEST)
r = np.floor(x)
p = np.exp2(x - r, dtype=F32)
blocks""",
            ),
        ),
        bug_class="backward-p",
    ),
    Fault(
        "exp-of-minus-lse",
        "The backward divides by l as exp(-lse), which overflows for LSE below -88.7.",
        kills=(bits(3, "values/low_lse"), accuracy("values/low_lse")),
        edits=(
            Edit(
                "backward",
                "rows = given * (F32(1) / f.l.T)[..., None]",
                "rows = given * (np.exp(-f.lse.T) * exp2_of(f.m.T))[..., None]",
            ),
        ),
        bug_class="lse-overflow",
    ),
    Fault(
        "dq-misses-the-last-key-tile",
        "dQ is written before its last key tile has been added.",
        kills=(bits(3, "documents/tile_edges"), accuracy("values/gaussian_full_attention")),
        edits=(
            Edit(
                "backward",
                "dq[:, :, queries], ds_turned,",
                "dq[:, :, queries] if key_tile < tiles - 1 or tiles == 1 else dq[:, :, queries] * 0, ds_turned,",
            ),
        ),
    ),
    Fault(
        "dq-in-the-order-of-arrival",
        "Key tiles add to dQ in a random order and in FP32, as atomics do.",
        kills=(promise("arguments/repeated_float32", "determinism"),),
        edits=(
            Edit("backward", "for key_tile in range(tiles):", "for key_tile in np.random.permutation(tiles).tolist():"),
            Edit(
                "backward",
                "dq = np.zeros((*heads, tiles * TILE, dim), kind)",
                "dq = np.zeros((*heads, tiles * TILE, dim), F32)",
            ),
            Edit(
                "backward",
                "dk, dv = np.zeros_like(dq), np.zeros_like(dq)",
                "dk, dv = (np.zeros_like(dq, kind) for _ in range(2))",
            ),
        ),
        bug_class="nondeterminism",
    ),
    Fault(
        "group-misses-its-last-head",
        "dK and dV sum all query heads of a group but the last.",
        kills=(bits(3, "heads/group_of_3"), accuracy("heads/group_of_3")),
        edits=(Edit("backward", "for g in range(1, self.group):", "for g in range(1, self.group - 1):"),),
        bug_class="gqa-mapping",
    ),
    Fault(
        "group-summed-in-bfloat16",
        "The partial sums over a group's query heads are rounded to bfloat16.",
        kills=(bits(3, "heads/group_of_8"),),
        edits=(
            Edit(
                "backward",
                "summed = summed + part[:, g]",
                "summed = (summed + part[:, g]).astype(bfloat16).astype(part.dtype)",
            ),
        ),
    ),
    Fault(
        "exponent-not-undone",
        "K's token exponents, folded into dS, are not taken out of dK again.",
        kills=(bits(3, "values/gaussian"), accuracy("values/gaussian")),
        edits=(Edit("backward", "dk = self._unfold(dk, np.broadcast_to(self.e_k, (*heads, tiles * TILE)))", "pass"),),
    ),
    Fault(
        "zero-token-loses-its-gradient",
        "A token of zeros is given the exponent of its scale byte, 2^-127, which pushes its dS out of range.",
        kills=(bits(3, "extremes/zero_queries"), accuracy("extremes/zero_keys")),
        edits=(
            Edit(
                "operands",
                "return np.where(zero, ZERO_TOKEN_EXPONENT, scaling.exponent_of(self.scale))",
                "return scaling.exponent_of(self.scale)",
            ),
        ),
        bug_class="zero-blocks",
    ),
    Fault(
        "idle-rows-move-the-scale",
        "Rows with dO = 0 take part in the maximum of their 32x32 tile of P.",
        kills=(promise("leak/idle_rows", "suffix"), bits(3, "values/no_gradient")),
        edits=(Edit("backward", "inactive = zero | (~bad & ~values.any(axis=-1))", "inactive = np.zeros_like(zero)"),),
        bug_class="future-leak",
    ),
    Fault(
        "v32-in-the-backward-diagonal",
        "The backward's diagonal tile takes V under 32-token scales: another V than the forward's, and a leak.",
        kills=(promise("leak/every_residue", "suffix"), bits(3, "extremes/rising_values")),
        edits=(
            Edit(
                "backward",
                'cut(o["v1"], kv_heads) if "v1" in o and "v_gradient" not in o else None',
                "None",
            ),
        ),
        bug_class="future-leak",
    ),
    Fault(
        "nan-times-zero-in-ds",
        "dS is masked before the token exponents are folded in, and not after: 0 x NaN.",
        kills=(promise("extremes/nan_in_k", "containment"),),
        edits=(
            Edit(
                "backward",
                "ds *= self.factor_k[..., keys, None] _select(ds, hidden)",
                "ds *= self.factor_k[..., keys, None]",
            ),
        ),
        bug_class="padding",
    ),
    Fault(
        "one-scale-per-tile-of-ds",
        "dS has one scale per 128 x 128 tile instead of sixteen.",
        kills=(bits(3, "values/gaussian"),),
        edits=(
            Edit(
                "backward",
                "scale = scale_rule(rule)(tile_amax(x))",
                "amax = tile_amax(x)\nscale = scale_rule(rule)(amax * 0 + amax.max(axis=(-2, -1), keepdims=True))",
            ),
        ),
    ),
    Fault(
        "softmax-scale-missing-in-ds",
        "dQ and dK are not multiplied by softmax_scale.",
        kills=(bits(3, "values/gaussian"), accuracy("values/gaussian")),
        edits=(Edit("backward", "ds *= F32(f.softmax_scale)", ""),),
    ),
    Fault(
        "gradient-padding-not-cleared",
        "dK of rows past the last document holds what was in the memory.",
        kills=(promise("documents/padding", "edges"), bits(3, "documents/padding")),
        edits=(
            Edit(
                "backward",
                "np.zeros((total, hq, dim), kind), np.zeros((total, hkv, dim), kind)",
                "np.zeros((total, hq, dim), kind), np.full((total, hkv, dim), 7, kind)",
            ),
        ),
        bug_class="padding",
    ),
)

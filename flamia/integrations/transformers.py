"""Hugging Face transformers: FLAMIA as an entry of `AttentionInterface`.

After ``flamia.integrations.transformers.register()`` a model is built with ``attn_implementation="flamia_mxfp8"``.

Note [Where documents come from]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
transformers gives attention ``(B, H, S, D)`` tensors and says in one of four ways which tokens belong together. The
first that is there is followed, as in transformers' own FlashAttention:

1. a padding mask ``(B, S)``: the real tokens of a row are one document. They are moved to the front, in order, and the
   rest become padding rows, which cost nothing; shapes do not depend on the mask, so no device is waited for. A mask
   without padding is no mask. On a GPU and under `torch.compile` that cannot be seen in advance: there such a mask
   beside ``position_ids`` of a pack is an error, as is any mask beside ``cu_seq_lens_q``.
2. ``cu_seq_lens_q`` (and an equal ``cu_seq_lens_k``): boundaries in the flattened ``(B * S)`` tokens; ``max_length_q``,
   if it is a number, is their ``max_seqlen``. Elsewhere that is S.
3. ``position_ids``: a document begins at the start of a row and wherever the position is not the previous one plus 1.
   Counting the documents waits for the device, once per layer; give ``cu_seq_lens_q`` to avoid that. Under
   `torch.compile` the count is not needed: ``cu_seqlens`` has ``B * S + 1`` entries, the surplus being empty documents.
4. none of them: every row is one document.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flamia.api import attention
from flamia.reference.recipes import Recipe, get_recipe

try:
    import torch
    from torch import Tensor, nn
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError(
        "flamia.integrations.transformers needs PyTorch and transformers 5 or later: "
        "run `pip install 'flamia[transformers]'`"
    ) from error

from flamia.pytorch.arguments import assert_equal_documents, check_cu_seqlens


def register(recipe: Recipe | str = "mxfp8", *, backend: str = "auto", name: str | None = None) -> str:
    """Make FLAMIA known to transformers.

    :param recipe: a `flamia.Recipe` or a name.
    :param backend: as in `flamia.attention`.
    :param name: what to call it; default ``flamia_<recipe>``.
    :returns: the name, for ``attn_implementation=``.
    """
    recipe = get_recipe(recipe)
    name = f"flamia_{recipe.name}" if name is None else name
    AttentionInterface.register(name, partial(attention_forward, recipe=recipe, backend=backend))
    AttentionMaskInterface.register(name, padding_mask)
    return name


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    local_size: int | None = None,
    **_: Any,
) -> Tensor | None:
    """What transformers calls to make a mask: the padding mask itself, or None where nothing is padded.

    :param local_size: the window or chunk of local attention. Some models give it here and not to `attention_forward`.
    :raises ValueError: for local attention that hides a token, and for a mask function that a model overlays.
    """
    if local_size is not None and local_size < kv_length:
        raise ValueError(
            f"sliding_window or attention_chunk_size must be None or at least the {kv_length} tokens of a row, "
            f"got {local_size}: FLAMIA has no local attention"
        )
    if use_vmap or (not torch.compiler.is_compiling() and holds_union(mask_function)):
        raise ValueError("mask_function must be the causal one: FLAMIA has no attention under another mask function")
    if attention_mask is None:
        return None
    on_cpu = attention_mask.device.type == "cpu" and not torch.compiler.is_compiling()
    return None if on_cpu and bool(attention_mask.all()) else attention_mask


def holds_union(mask_function: Any) -> bool:
    """Whether `or_masks` of transformers made ``mask_function`` or a part of it, as for ``block_sequence_ids``: an
    overlay by which tokens see later ones. It says so in no argument, only in what its closures hold."""
    if getattr(mask_function, "__qualname__", "").startswith("or_masks."):
        return True
    held = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    parts = [part for one in held for part in (one if isinstance(one, tuple) else (one,))]
    return any(holds_union(part) for part in parts if callable(part))


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    recipe: Recipe | str,
    backend: str = "auto",
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers; see Note [Where documents come from].

    :param query: ``(B, Hq, S, D)``. :param key: ``(B, Hkv, S, D)``. :param value: as key.
    :param attention_mask: None or ``(B, S)``, true or nonzero for real tokens.
    :returns: out ``(B, S, Hq, D)``, 0 at masked tokens, and None for the attention weights.
    :raises ValueError: for what FLAMIA does not do, by name.
    """
    check_supported(query, key, attention_mask, dropout, kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    longest: int | None = q.shape[1]  # no document goes on in another row

    def attend(cu_seqlens: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(
            q,
            k,
            v,
            cu_seqlens,
            max_seqlen=longest,
            causal=causal,
            softmax_scale=scaling,
            recipe=recipe,
            backend=backend,
        )

    if attention_mask is not None:
        check_mask(module, attention_mask, causal, position_ids, cu_seq_lens_q)
        order, cu_seqlens = compact(attention_mask)
        packed = attend(cu_seqlens, *(x.flatten(0, 1)[order] for x in (q, k, v)))
        return packed[torch.argsort(order)].view(q.shape), None
    if cu_seq_lens_q is None and cu_seq_lens_k is not None:
        raise ValueError("cu_seq_lens_q must be given with cu_seq_lens_k, got None")
    if cu_seq_lens_q is not None:
        cu_seqlens, longest = cu_seq_lens_q, max_length_q if isinstance(max_length_q, int) else None
        check_cu_seqlens(cu_seq_lens_q, q.device, "cu_seq_lens_q")
        if cu_seq_lens_k is not None and cu_seq_lens_k is not cu_seq_lens_q:
            check_cu_seqlens(cu_seq_lens_k, q.device, "cu_seq_lens_k")
            assert_equal_documents(cu_seq_lens_q, cu_seq_lens_k)
    elif position_ids is not None and position_ids.ndim == 2:
        cu_seqlens = documents_of_positions(position_ids.expand(q.shape[:2]))
    else:
        return attend(None, q, k, v), None
    return attend(cu_seqlens, *(x.flatten(0, 1) for x in (q, k, v))).view(q.shape), None


def check_supported(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> None:
    """Refuse by name what would otherwise be ignored."""
    if dropout:
        raise ValueError(f"attention_dropout must be 0, got {dropout}: FLAMIA has no dropout")
    tokens = query.shape[2]
    if key.shape[2] != tokens:
        raise ValueError(
            f"key must have the {tokens} tokens of query, got {key.shape[2]}: FLAMIA trains; it has no KV cache "
            "(pass use_cache=False) and no cross attention"
        )
    if attention_mask is not None and attention_mask.shape != (query.shape[0], tokens):
        raise ValueError(
            f"attention_mask must be a padding mask {(query.shape[0], tokens)}, got shape {tuple(attention_mask.shape)}"
        )
    window = kwargs.get("sliding_window")
    if window is not None and window < tokens:
        raise ValueError(f"sliding_window must be None or at least the {tokens} tokens of a row, got {window}")
    for name in ("softcap", "s_aux", "position_bias", "output_attentions"):
        value = kwargs.get(name)
        if value is not None and value is not False:
            shown = value if isinstance(value, bool | int | float) else type(value).__name__
            raise ValueError(f"{name} must be None, got {shown}: FLAMIA has no such attention")


def check_mask(
    module: nn.Module, mask: Tensor, causal: bool, position_ids: Tensor | None, cu_seq_lens_q: Tensor | None
) -> None:
    """Refuse what a padding mask would silently win over; see Note [Where documents come from].

    :raises ValueError: beside boundaries, and where the mask may be of keys alone.
    """
    if cu_seq_lens_q is not None:
        raise ValueError(
            "cu_seq_lens_q must be None beside a padding mask: leave attention_mask out (tokens past the last boundary "
            "are padding)"
        )
    config = getattr(module, "config", None)
    if not causal and any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention")):
        raise ValueError(
            "attention_mask must be None where a model with cross attention is not causal: there it masks keys, and "
            "FLAMIA takes masked keys for masked queries too"
        )
    if position_ids is not None and position_ids.ndim == 2:
        # A mask without padding is none (`padding_mask`), but that is seen in advance only on the CPU.
        torch._assert_async(
            ~(mask.bool().all() & (position_ids.diff(dim=1) != 1).any()),
            "attention_mask must be left out beside position_ids of packed documents, got one without padding",
        )


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where to take tokens from so that real ones come first, in order, and the boundaries of the rows among them.

    :param mask: ``(B, S)``.
    :returns: int64 ``(B * S,)`` and int32 ``(B + 1,)``.
    """
    real = mask.bool()
    order = torch.argsort(~real.flatten(), stable=True)
    ends = real.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return order, torch.nn.functional.pad(ends, (1, 0))


def documents_of_positions(position_ids: Tensor) -> Tensor:
    """Boundaries of the documents of ``position_ids (B, S)`` in the flattened tokens; int32."""
    starts = torch.nn.functional.pad(position_ids.diff(dim=1) != 1, (1, 0), value=True).flatten()
    total = starts.shape[0]
    if torch.compiler.is_compiling():
        first = torch.where(starts, torch.arange(total, device=starts.device), total).sort().values
    else:
        first = starts.nonzero().flatten()
    return torch.nn.functional.pad(first, (0, 1), value=total).int()

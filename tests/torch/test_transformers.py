"""A real Llama of Hugging Face transformers, built from a config, on FLAMIA's attention."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import flamia  # noqa: E402
from flamia.integrations.transformers import compact, documents_of_positions  # noqa: E402
from tests.torch.tensors import assert_same_bits  # noqa: E402

pytestmark = pytest.mark.torch

VOCABULARY = 97
LENGTHS = [37, 1, 150]
TOTAL = sum(LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def registered():
    names = [flamia.integrations.transformers.register(recipe) for recipe in ("mxfp8", "bf16")]
    assert names == ["flamia_mxfp8", "flamia_bf16"]


def llama(attention, dtype=torch.float32, **options):
    """The same weights for every kind of attention."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attn_implementation": attention,
        "use_cache": False,
    } | options
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).to(dtype).train()


def tokens(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def run(model, ids, labels=None, **inputs):
    """logits, loss and every parameter's gradient."""
    model.zero_grad()
    result = model(input_ids=ids, labels=ids if labels is None else labels, **inputs)
    result.loss.backward()
    return result.logits.detach(), result.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def relative_error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def packed_inputs():
    ids = tokens(1, TOTAL)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    boundaries = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return ids, positions, boundaries


# ---- close to eager ----------------------------------------------------------------------------------------


def layer_errors(recipe):
    """Relative errors of attention alone, summed over the layers, on this model's own q, k, v and dout.

    :returns: that of the output, and that of output and worst gradient together.
    """
    calls = []

    def spy(module, q, k, v, mask, scaling, **_):
        tensors = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        out = EagerAttention.apply(scaling, *tensors)
        calls.append([x.detach().numpy() for x in tensors] + [scaling])
        out.register_hook(calls[-1].append)
        return out.view(*q.transpose(1, 2).shape), None

    transformers.AttentionInterface.register("spy", spy)
    run(llama("spy"), tokens(1, 140))
    output = gradients = 0.0
    for q, k, v, scaling, dout in calls:
        cu, dout = np.array([0, 140]), dout.numpy()
        forward = flamia.reference.attention_forward(q, k, v, cu, recipe=recipe, softmax_scale=scaling)
        ours = flamia.reference.attention_backward(dout, forward)
        exact = flamia.reference.attention_oracle(q, k, v, cu, dout, softmax_scale=scaling)
        errors = [
            np.linalg.norm(a - b) / np.linalg.norm(b)
            for a, b in (
                (forward.out, exact.out),
                (ours.dq, exact.dq),
                (ours.dk, exact.dk),
                (ours.dv, exact.dv),
            )
        ]
        output += errors[0]
        gradients += errors[0] + max(errors[1:])
    return output, gradients


class EagerAttention(torch.autograd.Function):
    """The exact forward and backward of one causal document, by the float64 oracle."""

    @staticmethod
    def forward(ctx, scaling, q, k, v):
        ctx.scaling = scaling
        ctx.save_for_backward(q, k, v)
        return oracle(q, k, v, scaling)["out"]

    @staticmethod
    def backward(ctx, dout):
        exact = oracle(*ctx.saved_tensors, ctx.scaling, dout)
        return (None, *(exact[name] for name in ("dq", "dk", "dv")))


def oracle(q, k, v, scaling, dout=None):
    arrays = [x.detach().numpy() for x in (q, k, v, q if dout is None else dout)]
    exact = flamia.reference.attention_oracle(*arrays[:3], np.array([0, len(q)]), arrays[3], softmax_scale=scaling)
    return {name: torch.from_numpy(getattr(exact, name)).float() for name in ("out", "dq", "dk", "dv")}


@pytest.fixture(scope="module")
def budgets():
    """Twice the errors of the recipe's attention alone: residuals and norms may only dilute them."""
    return {f"flamia_{recipe}": [2 * e for e in layer_errors(recipe)] for recipe in ("mxfp8", "bf16")}


CLOSE = [
    *(
        ("flamia_mxfp8", kind)
        for kind in ("plain", "right padding", "left padding", "holes", "packed", "bidirectional")
    ),
    ("flamia_bf16", "plain"),
    ("flamia_bf16", "packed"),
]


@pytest.mark.parametrize(("name", "kind"), CLOSE)
def test_loss_and_gradients_are_close_to_eager(name, kind, budgets):
    ids, inputs, real, options = tokens(2, 140), {}, torch.ones(2, 140, dtype=torch.long), {}
    if kind in ("right padding", "left padding", "holes"):
        real[1, {"right padding": slice(101, None), "left padding": slice(0, 40), "holes": slice(50, 60)}[kind]] = 0
        inputs["attention_mask"] = real
    elif kind == "packed":
        ids, positions, _ = packed_inputs()
        real = torch.ones_like(ids)
        inputs["position_ids"] = positions
    elif kind == "bidirectional":
        options["is_causal"] = False
    labels = ids.masked_fill(real == 0, -100)
    logits, loss, gradients = run(llama("eager", **options), ids, labels, **inputs)
    our_logits, our_loss, our_gradients = run(llama(name, **options), ids, labels, **inputs)
    budget, gradient_budget = budgets[name]
    assert 0 < relative_error(our_logits[real.bool()], logits[real.bool()]) < budget
    assert abs(our_loss - loss) < budget * loss
    for parameter, exact in gradients.items():
        assert relative_error(our_gradients[parameter], exact) < gradient_budget, parameter


# ---- bit for bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["position_ids", "cu_seq_lens", "both cu_seq_lens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_separate_documents(kind, dtype):
    """Attention alone, without the linear layers, whose BLAS may round by the number of rows."""
    ids, positions, boundaries = packed_inputs()
    del ids
    torch.manual_seed(0)
    module = llama("flamia_mxfp8").model.layers[0].self_attn
    attend = transformers.AttentionInterface()["flamia_mxfp8"]
    q, k, v = (torch.randn(1, heads, TOTAL, 32).to(dtype).requires_grad_() for heads in (4, 2, 2))
    dout = torch.randn(1, TOTAL, 4, 32).to(dtype)
    inputs = {
        "position_ids": {"position_ids": positions},
        "cu_seq_lens": {"cu_seq_lens_q": boundaries, "position_ids": torch.arange(TOTAL)[None]},
        "both cu_seq_lens": {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries.clone()},
    }[kind]
    out, weights = attend(module, q, k, v, None, scaling=module.scaling, **inputs)
    assert weights is None and out.shape == (1, TOTAL, 4, 32)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    for start, stop in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        leaves = [x[:, :, start:stop].detach().requires_grad_() for x in (q, k, v)]
        alone, _ = attend(module, *leaves, None, scaling=module.scaling)
        assert_same_bits(out[:, start:stop], alone, "out")
        for a, b in zip(gradients, torch.autograd.grad(alone, leaves, dout[:, start:stop]), strict=True):
            assert_same_bits(a[:, :, start:stop], b, "gradient")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, TOTAL),
        ({"cu_seq_lens_q": True}, None),
        ({"cu_seq_lens_q": True, "max_length_q": max(LENGTHS)}, max(LENGTHS)),
        ({"cu_seq_lens_q": True, "max_length_q": torch.tensor(max(LENGTHS))}, None),
        ({"mask": True}, TOTAL),
    ],
    ids=["position_ids", "cu_seq_lens", "max_length", "max_length on the device", "padding mask"],
)
def test_how_long_a_document_can_be_is_passed_on(monkeypatch, options, expected):
    from flamia.integrations import transformers as integration

    seen = []
    attend = integration.attention
    monkeypatch.setattr(
        integration, "attention", lambda *rest, **named: (seen.append(named["max_seqlen"]), attend(*rest, **named))[1]
    )
    _, positions, boundaries = packed_inputs()
    q, k = (torch.randn(1, heads, TOTAL, 32) for heads in (4, 2))
    module = llama("flamia_mxfp8").model.layers[0].self_attn
    given = {"position_ids": positions} | options
    mask = torch.arange(TOTAL)[None] > 3 if given.pop("mask", False) else None
    if "cu_seq_lens_q" in given:
        given["cu_seq_lens_q"] = boundaries
    if mask is not None:
        del given["position_ids"]
    out, _ = transformers.AttentionInterface()["flamia_mxfp8"](module, q, k, k, mask, scaling=0.2, **given)
    assert out.shape == (1, TOTAL, 4, 32) and seen == [expected]


def test_a_packed_model_equals_its_documents():
    """The whole model: logits of the pack are those of each document alone, up to float32 rounding of BLAS."""
    ids, positions, boundaries = packed_inputs()
    model = llama("flamia_mxfp8").eval()
    with torch.no_grad():
        packed = model(ids, position_ids=positions).logits[0]
        by_boundaries = model(ids, position_ids=positions, cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries).logits[0]
        assert_same_bits(by_boundaries, packed)
        for start, stop in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
            alone = model(ids[:, start:stop]).logits[0]
            assert_same_bits(packed[start:stop].argmax(-1), alone.argmax(-1))
            assert relative_error(packed[start:stop], alone) < 2e-3
        changed = ids.clone()
        changed[:, : boundaries[2]] += 1
        other = model(changed % VOCABULARY, position_ids=positions).logits[0]
        assert_same_bits(other[boundaries[2] :], packed[boundaries[2] :], "the last document")


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_padding_is_inert(kind):
    """Masked tokens change no bit of the real ones, and get output and gradients 0."""
    module = llama("flamia_mxfp8").model.layers[0].self_attn
    attend = transformers.AttentionInterface()["flamia_mxfp8"]
    mask = torch.ones(3, 50, dtype=torch.bool)
    mask[1, {"left": slice(0, 13), "right": slice(30, None), "holes": slice(10, 20)}[kind]] = False
    mask[2] = False  # a row without a token
    leaves = [torch.randn(3, heads, 50, 32).requires_grad_() for heads in (4, 2, 2)]
    dout = torch.randn(3, 50, 4, 32)
    out, _ = attend(module, *leaves, mask, scaling=0.2)
    gradients = torch.autograd.grad(out, leaves, dout)
    assert not out[~mask].any()
    for row in range(2):
        real = [x[row : row + 1, :, mask[row]].detach().requires_grad_() for x in leaves]
        alone, _ = attend(module, *real, None, scaling=0.2)
        assert_same_bits(out[row, mask[row]], alone[0])
        expected = torch.autograd.grad(alone, real, dout[row, mask[row]][None])
        for a, b in zip(gradients, expected, strict=True):
            assert not a[row].transpose(0, 1)[~mask[row]].any()
            assert_same_bits(a[row][:, mask[row]], b[0])


def test_a_mask_of_ones_is_no_mask():
    ids = tokens(2, 40)
    model = llama("flamia_mxfp8")
    plain = run(model, ids)
    assert_same_bits(run(model, ids, attention_mask=torch.ones_like(ids))[0], plain[0])


def test_gradient_checkpointing_gives_the_same_bits():
    ids = tokens(2, 40)
    model = llama("flamia_mxfp8")
    expected = run(model, ids)
    model.gradient_checkpointing_enable()
    for name, gradient in run(model, ids)[2].items():
        assert_same_bits(gradient, expected[2][name], name)


def test_the_model_compiles_as_one_graph():
    """Padding mask and packing inside fullgraph; the surplus documents of a traced pack are empty."""
    torch._dynamo.reset()
    module = llama("flamia_mxfp8").model.layers[0].self_attn
    attend = transformers.AttentionInterface()["flamia_mxfp8"]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    _, positions, _ = packed_inputs()
    q, k, v = (torch.randn(1, heads, TOTAL, 32) for heads in (4, 2, 2))
    mask = torch.rand(1, TOTAL, generator=torch.Generator().manual_seed(2)) < 0.8
    for given, inputs in ((None, {"position_ids": positions}), (mask, {})):
        expected, _ = attend(module, q, k, v, given, scaling=0.2, **inputs)
        out, _ = compiled(module, q, k, v, given, scaling=0.2, **inputs)
        assert_same_bits(out, expected)


# ---- pieces and refusals -----------------------------------------------------------------------------------


def test_documents_of_positions():
    positions = torch.tensor([[0, 1, 2, 0, 0], [5, 6, 7, 9, 1]])
    assert documents_of_positions(positions).tolist() == [0, 3, 4, 5, 8, 9, 10]
    assert documents_of_positions(torch.arange(4).expand(2, 4)).tolist() == [0, 4, 8]


def test_compact():
    order, boundaries = compact(torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 0]]))
    assert order.tolist() == [1, 2, 3, 5, 0, 4, 6, 7, 8]
    assert boundaries.tolist() == [0, 2, 4, 4]


def attend_with(mask=None, tokens_of_key=20, **options):
    module = llama("flamia_mxfp8").model.layers[0].self_attn
    q, k = torch.zeros(1, 4, 20, 32), torch.zeros(1, 2, tokens_of_key, 32)
    return transformers.AttentionInterface()["flamia_mxfp8"](module, q, k, k, mask, scaling=0.2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "attention_dropout must be 0, got 0.1"),
        ({"sliding_window": 19}, "sliding_window must be None or at least the 20 tokens of a row, got 19"),
        ({"softcap": 30.0}, "softcap must be None, got 30.0"),
        ({"s_aux": torch.ones(4)}, "s_aux must be None, got Tensor"),
        ({"output_attentions": True}, "output_attentions must be None, got True"),
        ({"mask": torch.zeros(1, 1, 20, 20)}, r"attention_mask must be a padding mask \(1, 20\)"),
        ({"tokens_of_key": 21}, "key must have the 20 tokens of query, got 21: FLAMIA trains"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 20]), "cu_seq_lens_k": torch.tensor([0, 19])},
            "cu_seqlens_k must equal cu_seqlens_q",
        ),
        ({"cu_seq_lens_k": torch.tensor([0, 20])}, "cu_seq_lens_q must be given with cu_seq_lens_k"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 20]), "max_length_q": 19},
            r"max_seqlen must be at least the longest document of cu_seqlens \(20\), got 19",
        ),
        (
            {"mask": torch.arange(20)[None] > 3, "cu_seq_lens_q": torch.tensor([0, 20])},
            "cu_seq_lens_q must be None beside a padding mask",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        attend_with(**options)


def test_a_wide_sliding_window_hides_nothing():
    assert attend_with(sliding_window=20)[0].shape == (1, 20, 4, 32)


def test_another_mask_function_is_refused():
    from transformers.masking_utils import create_causal_mask

    config = llama("flamia_mxfp8").config
    with pytest.raises(ValueError, match="mask_function must be the causal one"):
        create_causal_mask(
            config, torch.zeros(1, 5, 128), None, None, or_mask_function=lambda batch, head, q, k: q >= k
        )


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_that_see_both_ways_are_refused(packed):
    from transformers.masking_utils import create_causal_mask

    config = llama("flamia_mxfp8").config
    positions = torch.tensor([[0, 1, 2, 0, 1]]) if packed else torch.arange(5)[None]
    blocks = torch.tensor([[-1, 0, 0, 0, -1]])
    arguments = (config, torch.zeros(1, 5, 128), None, None, positions)
    assert create_causal_mask(*arguments) is None
    with pytest.raises(ValueError, match="mask_function must be the causal one"):
        create_causal_mask(*arguments, block_sequence_ids=blocks)


def test_local_attention_that_only_the_mask_knows_is_refused():
    """Phi-MoE gives its window to the mask alone, Llama 4 its chunks."""
    from transformers.masking_utils import create_chunked_causal_mask, create_sliding_window_causal_mask

    config = llama("flamia_mxfp8").config
    config.sliding_window = config.attention_chunk_size = 5
    for create in (create_chunked_causal_mask, create_sliding_window_causal_mask):
        assert create(config, torch.zeros(1, 5, 128), None, None) is None
        with pytest.raises(ValueError, match=r"sliding_window or attention_chunk_size .* the 6 tokens of a row, got 5"):
            create(config, torch.zeros(1, 6, 128), None, None)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_full_mask_beside_a_pack_never_joins_its_documents(backend):
    """Eager on the CPU sees that the mask hides nothing; where it cannot be seen, it is an error."""
    torch._dynamo.reset()
    ids, positions, _ = packed_inputs()
    model = llama("flamia_mxfp8", num_hidden_layers=1).eval()
    inputs = {"attention_mask": torch.ones_like(ids), "position_ids": positions}
    with torch.no_grad():
        assert_same_bits(model(ids, **inputs).logits, model(ids, position_ids=positions).logits)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with pytest.raises(RuntimeError, match="attention_mask must be left out beside position_ids"):
            compiled(ids, **inputs)
        padded = torch.ones_like(ids)
        padded[:, -9:] = 0
        compiled(ids, attention_mask=padded, position_ids=positions)
        compiled(ids, attention_mask=torch.ones_like(ids))


def test_cross_attention_under_a_mask_is_refused():
    """Queries and keys may happen to be equally many; the mask is of the keys alone."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        attn_implementation="flamia_mxfp8",
    )
    model, ids = transformers.BartForConditionalGeneration(config).eval(), tokens(1, 20)
    encoded = torch.zeros(1, 20, 64)
    mask = torch.ones_like(ids)
    mask[:, 15:] = 0
    arguments = {"decoder_input_ids": ids, "encoder_outputs": (encoded,), "use_cache": False}
    assert model(attention_mask=torch.ones_like(ids), **arguments).logits.shape == (1, 20, VOCABULARY)
    with pytest.raises(ValueError, match="attention_mask must be None where a model with cross attention"):
        model(attention_mask=mask, **arguments)


def test_generation_with_a_cache_is_refused():
    model = llama("flamia_mxfp8").eval()
    with pytest.raises(ValueError, match="FLAMIA trains; it has no KV cache"):
        model.generate(tokens(1, 5), max_new_tokens=2, use_cache=True, pad_token_id=0)
    assert model.generate(tokens(1, 5), max_new_tokens=2, use_cache=False, pad_token_id=0).shape == (1, 7)

"""Room for tiles of X, and wrong arguments of the Hopper backward, without a GPU."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flamia.conformance.simulator.host import simulated_device  # noqa: E402
from flamia.kernels import hopper, hopper_backward, quantize, schedule  # noqa: E402
from flamia.kernels.nvrtc import NvrtcNotFoundError, load_nvrtc  # noqa: E402
from flamia.kernels.stored import count_pairs, divide_heads  # noqa: E402
from flamia.kernels.targets import SM_90A  # noqa: E402

TOKENS, DIM, HEADS = 300, 64, (4, 2)
X_BYTES = hopper_backward.X_BYTES["mxfp8"]

# ---- numbers of pairs --------------------------------------------------------------------------------------


def first_pair(causal, longest, document, start):
    """What the function of that name in ``common/pairs.cuh`` computes."""
    return start * (longest + 2 if causal else 2 * (longest + 1)) // 256 + document


@pytest.mark.parametrize("causal", [True, False])
def test_pairs_of_documents_have_different_numbers_below_their_count(causal):
    rng = np.random.default_rng(1)
    for trial in range(400):
        lengths = rng.integers(0, rng.choice([2, 130, 700, 3000]), rng.integers(1, 30))
        if trial % 4 == 0:
            lengths = lengths // 128 * 128 + trial % 3  # one token more than whole tiles is the most for its tokens
        cu = np.concatenate([[0], np.cumsum(lengths)])
        tiles = -(-lengths // 128)
        longest, end = int(tiles.max()), 0
        for document, count in enumerate(tiles.tolist()):
            first = first_pair(causal, longest, document, int(cu[document]))
            assert first >= end, (lengths, document)
            end = first + (count * (count + 1) // 2 if causal else count**2)
        assert end <= count_pairs(int(cu[-1]), len(lengths), longest, causal)


@pytest.mark.parametrize(("longest", "factor"), [(3, 1.2), (None, 51)])
def test_room_for_a_pack_is_near_what_it_needs_if_its_longest_document_is_known(longest, factor):
    lengths = [300] * 109
    pairs = count_pairs(sum(lengths), len(lengths), longest or -(-sum(lengths) // 128), True)
    assert 109 * 6 <= pairs < factor * 109 * 6


# ---- chunks of heads ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    """Forwards whose arrays have shapes and no content: launches do nothing."""

    def forward(dim=DIM, **options):
        q, k, v = (torch.ones(TOKENS, h, dim, dtype=torch.bfloat16) for h in (HEADS[0], HEADS[1], HEADS[1]))
        return hopper.attention_forward(q, k, v, torch.tensor([0, 100, TOKENS]), **options)

    with simulated_device(SM_90A), pytest.MonkeyPatch.context() as patch:
        for module in (hopper, quantize, schedule):
            patch.setattr(module, "launch", lambda *rest, **more: None)
        return {
            "usual": forward(),
            "wide": forward(dim=128),
            "bounded": forward(max_seqlen=200),
            "unscaled": forward(recipe="bf16"),
        }


def test_chunks_are_as_few_as_fit_and_as_equal_as_can_be(made):
    plan = replace(made["usual"].schedule, num_q_heads=16, num_kv_heads=8)
    head = 2 * divide_heads(plan, 0, X_BYTES).pairs * X_BYTES  # of a KV head with its query heads
    found = [divide_heads(plan, size, X_BYTES).heads for size in (0, head - 1, head, 7 * head, 8 * head, 1 << 60)]
    assert found == [0, 0, 1, 4, 8, 8]


def test_a_bound_of_lengths_makes_pairs_fewer(made):
    free, bounded = (divide_heads(made[name].schedule, 0, X_BYTES).pairs for name in ("usual", "bounded"))
    assert (free, bounded) == (count_pairs(TOKENS, 2, 3, True), count_pairs(TOKENS, 2, 2, True))
    assert bounded < free


# ---- arguments ---------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Entries and structs of the launches; none happens."""
    found = []

    def record(unit, entry, params, *rest, **more):
        found.append((entry, params))

    with simulated_device(SM_90A), pytest.MonkeyPatch.context() as patch:
        for module in (hopper_backward, quantize):
            patch.setattr(module, "launch", record)
        patch.setattr(hopper_backward, "count_multiprocessors", lambda device: 2)
        yield found


def differentiate(f, **changed):
    right = {"dout": torch.ones_like(f.out), "out": f.out, "m": f.m, "l": f.l, "inputs": f.inputs}
    right |= {"schedule": f.schedule, "softmax_scale": 0.125}
    return hopper_backward.attention_backward(**(right | changed))


def test_launches_of_each_chunk(made, launched):
    """Two kernels for every chunk, after two that all share; X of a chunk begins where the buffer does."""
    differentiate(made["usual"], stored_bytes=0)
    assert [entry for entry, _ in launched] == [
        "row_pass",
        "backward_operands",
        *["backward_keys", "backward_dq"] * 2,
    ]
    chunks = [(int(p["first_head"][0]), int(p["last_head"][0]), int(p["x"][0])) for _, p in launched[2:]]
    x = chunks[0][2]
    assert x != 0 and chunks == [(0, 1, x), (0, 1, x), (1, 2, x), (1, 2, x)]
    del launched[:]
    differentiate(made["usual"])
    assert [entry for entry, _ in launched[2:]] == ["backward_keys", "backward_dq"]
    tickets = [int(p["ticket"][0]) for _, p in launched[2:]]
    assert len(set(tickets)) == 2, "each kernel counts what it has taken in a place of its own"


@pytest.mark.parametrize("widens", [False, True])
def test_copies_of_q_and_dout_are_made_in_memory_or_not_at_all(made, launched, widens):
    differentiate(made["usual"], widens=widens)
    (row_pass, rows), *others = launched
    assert row_pass == ("row_pass" if widens else "row_pass_wide")
    pointers = [int(rows["wide"][0])] + [int(p[name][0]) for _, p in others for name in ("q_wide", "dout_wide")]
    assert not any(pointers) if widens else all(pointers)


def test_short_documents_are_widened_in_shared_memory(made):
    """By what the host knows: their mean length, and the longest."""

    def prefers(tokens, documents, longest=None, causal=True, shared=False):
        offsets = torch.zeros(documents + 1, dtype=torch.int32)
        changed = {"num_tokens": tokens, "tile_offsets": offsets, "max_seqlen": longest, "causal": causal}
        changed |= {"num_q_heads": 8, "num_kv_heads": 2 if shared else 8}
        return hopper_backward.prefers_widening(replace(made["usual"].schedule, **changed))

    for kind, bound in hopper_backward.WIDENS_UP_TO.items():
        for documents in (1, 2, 7):
            for longest in (None, bound, documents * bound + 5):
                assert prefers(documents * bound, documents, longest, *kind), (kind, documents, longest)
                assert not prefers(documents * (bound + 1), documents, bound + 1 if longest else None, *kind)
    assert prefers(32768, 40, 3092) and prefers(40 * 300, 40, 1 << 20)
    assert not prefers(61576, 65, 32768), "one long document among many short ones has nearly all of the work"
    assert not prefers(5, 0)


def test_unscaled_operands_are_read_where_they_are(made, launched):
    f = made["unscaled"]
    differentiate(f)
    assert [entry for entry, _ in launched] == [
        *("row_pass_unscaled", "backward_operands"),
        *("backward_keys", "backward_dq"),
    ]
    (_, rows), *others = launched
    packed, dout = f.inputs, int(rows["wide"][0])
    assert dout and not rows["payload"][0] and not rows["token_scales"][0]
    for _, params in others:
        found = {name: int(params[name][0]) for name in ("q", "q_wide", "k", "v", "dout", "dout_wide")}
        q, k, v = (x.wide.data_ptr() for x in (packed.q, packed.k, packed.v))
        assert found == {"q": q, "q_wide": q, "k": k, "v": v, "dout": dout, "dout_wide": dout}


REFUSED = {
    "schedule": (lambda f: None, "schedule must be a DeviceSchedule, got NoneType"),
    "out": (lambda f: torch.ones(TOKENS, 4, 96), r"out must have a head_dim of \(64, 128\) on Hopper, got 96"),
    "m": (lambda f: torch.ones(4, 7), r"m must have shape \(4, 300\), got \(4, 7\)"),
    "l": (lambda f: None, "l must be a float32 torch tensor, got NoneType"),
    "softmax_scale": (lambda f: float("nan"), "softmax_scale must be from 0 to"),
    "stored_bytes": (lambda f: -1, "stored_bytes must be at least 0, got -1"),
    "stored_bytes, no integer": (lambda f: 2e9, "stored_bytes must be an integer, got 2000000000.0"),
    "inputs": (lambda f: None, "inputs must be a QuantizedInputs or a PackedInputs, got NoneType"),
    "inputs, of another head_dim": (lambda f: f["wide"].inputs, r"inputs.q.payload must be .* \(4, 4, 8192\)"),
    "inputs, packed": (
        lambda f: replace(f["unscaled"].inputs, k=f["unscaled"].inputs.q),
        r"inputs.k.wide must be .* \(2, 4, 16384\)",
    ),
    "inputs, with V as Blackwell has it": (
        lambda f: replace(f["usual"].inputs, v=replace(f["usual"].inputs.v, exponents=None)),
        "inputs.v.exponents must be a contiguous torch.float32 .* got None: the forward kept nothing for a backward",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_argument_is_refused_before_a_launch(made, launched, what):
    value, words = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=words):
        differentiate(made["usual"], **{what.split(",")[0]: value(made)})
    assert not launched


@pytest.mark.parametrize(("length", "error"), [(199, TypeError), (-1, ValueError), ("long", TypeError)])
def test_max_seqlen_is_checked(length, error):
    if length == 199:
        length = 199.0
    with simulated_device(SM_90A) as (device, _), pytest.raises(error, match="max_seqlen must be"):
        schedule.build_schedule(torch.tensor([0, 5], device=device), 5, 1, 1, True, max_seqlen=length)


@pytest.mark.parametrize(("length", "legal"), [(200, True), (199, False)])
def test_a_document_that_is_too_long_empties_every_list(length, legal):
    try:
        load_nvrtc()
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    with simulated_device(SM_90A) as (device, _):
        cu = torch.tensor([0, 100, TOKENS], device=device)
        plan = schedule.build_schedule(cu, TOKENS, *HEADS, True, max_seqlen=length)
        used = [int(plan.status[i]) for i in (schedule.NUM_TILES, schedule.NUM_FORWARD, schedule.NUM_BACKWARD)]
        if legal:
            plan.check()
            assert used == [3, 8, 6]
        else:
            with pytest.raises(ValueError, match=r"^no document may be longer than max_seqlen: got"):
                plan.check()
            assert used == [0, 0, 0]

"""`flamia.attention` on a GPU under torch.compile, in CUDA graphs, and under PyTorch's checks of operators."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.library import opcheck  # noqa: E402

import flamia  # noqa: E402
from tests.torch.tensors import assert_same_bits, random_qkv  # noqa: E402

pytestmark = pytest.mark.torch

DIM = 64
PACKS = [(70, [0, 1, 40, 66]), (133, [0, 133]), (500, [0, 0, 10, 20, 300, 500]), (70, [0, 30, 70])]


def layer(qkv, cu):
    """Attention between things that a compiler fuses."""
    qkv = qkv * 2
    out, lse = flamia.attention(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], cu, return_lse=True)
    return out + 1, lse


def compare(compiled, device, packs):
    """Bits of a compiled `layer` and its gradient against eager mode."""
    for total, boundaries in packs:
        generator = torch.Generator().manual_seed(total)
        qkv = torch.randn(total, 8, DIM, generator=generator).to(device, torch.bfloat16).requires_grad_()
        cu = torch.tensor(boundaries, dtype=torch.int32, device=device)
        out, lse = compiled(qkv, cu)
        expected, expected_lse = layer(qkv, cu)
        assert_same_bits(out, expected, "out")
        assert_same_bits(lse, expected_lse, "lse")
        gradient, wanted = (torch.autograd.grad(x.sum(), qkv)[0] for x in (out, expected))
        assert_same_bits(gradient, wanted, "gradient")


# ---- torch.compile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_once_for_every_pack(gpu, backend):
    """Changing T, number of documents and boundaries: one graph, and the bits of eager mode."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compare(torch.compile(layer, fullgraph=True, dynamic=True, backend=counter), gpu, PACKS)
    assert counter.frame_count == 1


def test_the_compilers_own_cuda_graphs(gpu):
    """``mode="reduce-overhead"`` records the compiled function; boundaries of one shape change from call to call."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    packs = [(300, [0, 100, 300]), (300, [0, 1, 200]), (300, [0, 299, 300]), (300, [0, 150, 150]), (300, [0, 0, 300])]
    compare(lambda qkv, cu: [x.clone() for x in compiled(qkv, cu)], gpu, packs)
    assert counters["inductor"]["cudagraph_skips"] == 0


# ---- CUDA graphs -------------------------------------------------------------------------------------------


def warm_up(run):
    """Run before a capture, on a stream of its own, as PyTorch asks for: kernels are loaded, autograd's thread runs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)


def pack(device, seed, boundaries, total=420):
    q, k, v, dout = (x.detach().to(device) for x in random_qkv(total, (4, 2), DIM, seed=seed))
    return q, k, v, dout, torch.tensor(boundaries, dtype=torch.int32, device=device)


def test_both_passes_replay_on_new_data(gpu):
    static = pack(gpu, 0, [0, 100, 400, 400])
    q, k, v = (x.requires_grad_() for x in static[:3])
    dout, cu = static[3:]

    def run():
        out, lse = flamia.attention(q, k, v, cu, return_lse=True)
        return (out, lse, *torch.autograd.grad(out, (q, k, v), dout))

    warm_up(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for seed, boundaries in [(1, [0, 420, 420, 420]), (2, [0, 1, 130, 300]), (3, [0, 0, 0, 0])]:
        fresh = pack(gpu, seed, boundaries)
        with torch.no_grad():
            for to, x in zip((q, k, v, dout, cu), fresh, strict=True):
                to.copy_(x)
        graph.replay()
        replayed = [x.clone() for x in results]
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), replayed, run(), strict=True):
            assert_same_bits(a, b, f"{name} of pack {seed}")


class Block(nn.Module):
    """Attention with projections and a residual."""

    def __init__(self, width=256):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 8 * DIM, bias=False), nn.Linear(4 * DIM, width, bias=False)

    def forward(self, x, cu):
        qkv = self.qkv(nn.functional.rms_norm(x, x.shape[-1:])).view(len(x), 8, DIM).bfloat16()
        return x + self.out(flamia.attention(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], cu).flatten(1).float())


class Model(nn.Module):
    """Two of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, cu):
        for block in self.blocks:
            x = block(x, cu)
        return x


def make_step(model, optimizer, x, target, cu):
    """One step of training."""

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x, cu), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_a_training_step_replays_on_new_data(gpu):
    """Forward, backward and optimizer of two layers in one graph; after every replay, all weights as in eager mode."""
    torch.manual_seed(0)
    total, width = 420, 256
    model = Model().to(gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    static = [torch.randn(total, width, device=gpu) for _ in range(2)]
    static.append(torch.tensor([0, 100, 400, 400], dtype=torch.int32, device=gpu))
    step = make_step(model, optimizer, *static)
    warm_up(step)

    eager = copy.deepcopy(model)
    eager_optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3, capturable=True)
    eager_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()

    before = [p.clone() for p in model.parameters()]
    for boundaries in ([0, 420, 420, 420], [0, 1, 130, 300], [0, 7, 7, 420]):
        fresh = [torch.randn(total, width, device=gpu) for _ in range(2)]
        fresh.append(torch.tensor(boundaries, dtype=torch.int32, device=gpu))
        for to, x in zip(static, fresh, strict=True):
            to.copy_(x)
        graph.replay()
        expected = make_step(eager, eager_optimizer, *fresh)()
        assert_same_bits(loss, expected, "loss")
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert_same_bits(p, q, name)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "nothing was trained"


# ---- torch.library.opcheck ---------------------------------------------------------------------------------


@pytest.fixture
def filled():
    """What is kept has room that nothing writes or reads, such as halves of tiles without a token: it is filled."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck(gpu, kernel, dtype, causal, filled):
    q, k, v, dout = (
        x.detach().to(gpu).requires_grad_(x.requires_grad) for x in random_qkv(total=170, dim=DIM, dtype=dtype)
    )
    cu = torch.tensor([0, 1, 140, 166], dtype=torch.int32, device=gpu)
    forward_op, backward_op = (
        getattr(torch.ops.flamia, f"attention_{name}").default for name in ("forward", "backward")
    )
    rest = ("mxfp8", causal, 0.2, kernel)
    opcheck(forward_op, (q, k, v, cu, None, *rest, True))
    results = forward_op(q, k, v, cu, None, *rest, True)
    out, _, m, l, kept = (x if isinstance(x, list) else x.detach() for x in results)  # noqa: E741
    opcheck(backward_op, (dout, out, m, l, cu, kept, 2, *rest))
    opcheck(backward_op, (dout[:1].expand_as(dout), out, m, l, cu, kept, 2, *rest))

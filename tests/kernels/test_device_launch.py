"""Streams, CUDA graphs and determinism of the launches, on a GPU."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from flamia.kernels import launch, quantize, registry, schedule

ROOT = Path(__file__).resolve().parents[2]


def call(cu, q, k, v):
    plan = schedule.build_schedule(cu, q.shape[0], q.shape[1], k.shape[1], True)
    return quantize.quantize_qkv(q, k, v, plan)


def in_use(result, tiles):
    """Every tensor of a `QuantizedInputs`, the tiles in use."""
    tensors = {}
    for name in ("q", "k", "v", "v1"):
        part = getattr(result, name)
        for field in dataclasses.fields(part):
            x = getattr(part, field.name)
            if x is not None:
                tensors[f"{name}.{field.name}"] = x[:, :tiles].clone()
    return tensors


def inputs(gpu, seed, lengths):
    import torch

    generator = torch.Generator(device=gpu).manual_seed(seed)
    cu = torch.tensor([0, *lengths], device=gpu).cumsum(0)
    shapes = [(1000, h, 128) for h in (4, 2, 2)]
    return cu, [torch.randn(s, generator=generator, device=gpu).bfloat16() for s in shapes]


def test_a_replayed_graph_gives_what_an_eager_call_gives(gpu):
    import torch

    cu, tensors = inputs(gpu, 0, [300, 200, 100, 400])
    static_cu, static = cu.clone(), [t.clone() for t in tensors]
    call(static_cu, *static)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(static_cu, *static)
    for seed, lengths in ((1, [1, 2, 3, 900]), (2, [1000, 0, 0, 0]), (3, [0, 128, 129, 0])):
        cu, tensors = inputs(gpu, seed, lengths)
        static_cu.copy_(cu)
        for static_tensor, tensor in zip(static, tensors, strict=True):
            static_tensor.copy_(tensor)
        graph.replay()
        tiles = sum(-(-n // 128) for n in lengths)
        eager, replayed = in_use(call(cu, *tensors), tiles), in_use(captured, tiles)
        for name, expected in eager.items():
            bits = [x.view(torch.int32) if x.dtype == torch.float32 else x for x in (replayed[name], expected)]
            assert torch.equal(*bits), (seed, name)


def test_launches_follow_the_current_stream(gpu):
    import torch

    cu, tensors = inputs(gpu, 5, [300, 200, 100, 400])
    expected = in_use(call(cu, *tensors), 10)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = [torch.zeros_like(t) for t in tensors]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # data arrives late, on this stream
        for to, value in zip(late, tensors, strict=True):
            to.copy_(value)
        got = in_use(call(cu, *late), 10)
    stream.synchronize()
    for name, value in expected.items():
        assert torch.equal(got[name].view(torch.uint8), value.view(torch.uint8)), name


def test_a_hundred_runs_give_the_same_bits(gpu):
    import torch

    cu, tensors = inputs(gpu, 6, [300, 200, 100, 400])
    first = in_use(call(cu, *tensors), 10)
    for _ in range(100):
        again = in_use(call(cu, *tensors), 10)
        for name, value in first.items():
            assert torch.equal(again[name].view(torch.uint8), value.view(torch.uint8)), name


def test_a_kernel_cannot_be_loaded_during_capture(gpu, monkeypatch):
    import torch

    monkeypatch.setattr(launch, "_LOADED", {})
    cu, tensors = inputs(gpu, 7, [1000])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run the call once outside the capture"), torch.cuda.graph(graph):
        call(cu, *tensors)


def test_another_params_struct_is_refused(gpu):
    from flamia.kernels import structs

    params = structs.fill(structs.DECODE, {})
    with pytest.raises(ValueError, match="params must have the"):
        launch.launch(registry.SCHEDULE.unit(), "build_schedule", params, gpu, ctas=1)


def test_two_processes_build_and_run_the_same_kernel_at_once(gpu, empty_cache):
    code = (
        "import torch; from flamia.kernels.conversions import convert;"
        "x = torch.tensor([1.0, 448.0, -0.0], device='cuda'); print(convert(x, 'e4m3').tolist())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in running:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        assert out.strip() == "[56, 126, 128]"

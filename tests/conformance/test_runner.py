"""The runner, the levels and the targets, on implementations whose verdict is known."""

import dataclasses

import numpy as np
import pytest
from ml_dtypes import bfloat16

from flamia.conformance import LEVELS, Inputs, Report, Target, TargetUnavailableError, resolve_target, run
from flamia.conformance.report import exit_code
from flamia.conformance.targets import PROMISES, CallableTarget, ReferenceTarget
from flamia.reference import RECIPES, attention_backward, attention_forward, attention_oracle

FEW = ["documents/empty_middle", "documents/padding", "values/one_hot", "leak/transformer_engine_3248"]


def exact(q, k, v, cu_seqlens, *, causal, softmax_scale):
    """A callable of NumPy arrays: float64 attention, rounded once."""
    found = attention_oracle(q, k, v, cu_seqlens, causal=causal, softmax_scale=softmax_scale)
    return found.out.astype(q.dtype), found.lse.astype(np.float32)


exact.tensors = "numpy"
# the oracle multiplies what it masks by zero, and its BLAS may sum in another order for another shape
exact.promises = ("leak", "edges", "determinism", "strides", "zero_scale")


class ReferenceObject:
    """The reference behind the protocol of objects, without stages."""

    tensors, recipe, bits, name = "numpy", "mxfp8", True, "object"
    promises = frozenset(PROMISES) - {"graph"}

    def forward(self, q, k, v, cu_seqlens, *, causal, softmax_scale):
        f = attention_forward(q, k, v, cu_seqlens, causal=causal, softmax_scale=softmax_scale)
        return f.out, f.lse, f

    def backward(self, dout, saved):
        g = attention_backward(dout, saved)
        return g.dq, g.dk, g.dv


def failures(report: Report) -> dict[str, str]:
    return {r.name: r.message for r in report.failures()}


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fp8"])
def test_the_reference_passes(recipe: str) -> None:
    few = ["extremes/nan_in_k", "extremes/scale_*", "extremes/tiny_blocks", "strides/sliced_qkv", "offsets/*"]
    report = run("reference", cases=[*FEW, *few, "arguments/malformed", "values/ones"], recipe=recipe)
    assert failures(report) == {} and report.passed
    assert {level: report.level_status(level) for level in LEVELS} == {
        0: "not_applicable", 1: "passed", 2: "passed", 3: "passed", 4: "passed", 5: "passed"
    }  # fmt: skip


class Narrow(ReferenceObject):
    """Refuses every head_dim but 64, and that one too if told so."""

    allowed = (64,)

    def forward(self, q, k, v, cu_seqlens, **options):
        if q.shape[2] not in self.allowed:
            raise ValueError(f"q must have a head_dim of {self.allowed}, got {q.shape[2]}")
        return super().forward(q, k, v, cu_seqlens, **options)


def test_a_head_dim_may_be_refused_where_the_case_says_so():
    report = run(Narrow(), levels=[2, 3, 5], cases=["heads/dim_96", "heads/dim_64"], size="full")
    assert failures(report) == {} and report.passed
    found = {(r.level, r.case): r for r in report.results}
    for level in (2, 3, 5):
        assert found[level, "heads/dim_64"].status == "passed"
        assert found[level, "heads/dim_96"].status == "not_applicable"
        assert found[level, "heads/dim_96"].message == "refused: ValueError: q must have a head_dim of (64,), got 96"
    alone = run(Narrow(), levels=[5], cases=["heads/dim_96"], size="full")
    assert not alone.passed and exit_code(alone) == 4


def test_a_head_dim_that_training_needs_may_not_be_refused():
    target = Narrow()
    target.allowed = ()
    report = run(target, levels=[2, 3, 5], cases=["heads/dim_64"], size="full")
    assert [r.status for r in report.results] == ["error"] * 3


class OutOfMemory(RuntimeError):
    """As PyTorch's are, a subclass."""


class Raising(Target):
    """Raises what it is told to, wherever it is not asked for bfloat16 and a head_dim of 64."""

    name, bits, recipe, alive = "raising", True, "bf16", True

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False):
        if inputs.head_dim == 64 and inputs.q.dtype == bfloat16:
            return ReferenceTarget("bf16").run(inputs, backward=backward)
        raise self.error

    def is_alive(self) -> bool:
        return self.alive


REFUSABLE = ["heads/dim_32", "arguments/repeated_float32"]


@pytest.mark.parametrize("kind", [TypeError, ValueError, NotImplementedError, RuntimeError])
def test_a_refusal_is_not_applicable_at_every_level(kind):
    report = run(Raising(kind("not this\nnor that")), levels=[2, 3, 4, 5], cases=REFUSABLE)
    assert {r.level for r in report.results} == {2, 3, 4, 5}
    assert {(r.status, r.message) for r in report.results} == {
        ("not_applicable", f"refused: {kind.__name__}: not this")
    }


@pytest.mark.parametrize("kind", [NameError, AssertionError, OutOfMemory, OSError])
def test_any_other_exception_is_an_error_also_where_a_case_may_be_refused(kind):
    report = run(Raising(kind("broken")), levels=[2, 3, 4, 5], cases=REFUSABLE)
    assert {r.level for r in report.results} == {2, 3, 4, 5}
    assert {(r.status, r.message) for r in report.results} == {("error", f"{kind.__name__}: broken")}


def test_a_call_that_ends_the_device_is_no_refusal():
    target = Raising(RuntimeError("an illegal memory access was encountered"))
    target.alive = False
    report = run(target, levels=[5], cases=["heads/dim_32"])
    assert [r.status for r in report.results] == ["error"]


def test_a_callable_that_no_call_gets_through_refuses_nothing():
    def broken(q, k, v, cu_seqlens, *, causal, softmax_scale):
        raise RuntimeError("always")

    broken.tensors = "numpy"
    report = run(broken, levels=[5], cases=["heads/dim_32"])
    assert [(r.status, r.message) for r in report.results] == [("error", "RuntimeError: always")]


@pytest.mark.parametrize(("recipe", "profile"), [("mxfp8", "blackwell"), ("mxfp8", "hopper"), ("bf16", "hopper")])
def test_the_reference_passes_under_a_bit_accurate_profile(recipe: str, profile: str) -> None:
    report = run("reference", cases=["documents/empty_middle", "extremes/nan_in_k"], recipe=recipe, profile=profile)
    assert failures(report) == {} and report.passed and report.profile == profile


def test_an_object_without_stages_has_bits_of_its_outputs_only() -> None:
    report = run(ReferenceObject(), cases=FEW)
    assert failures(report) == {}
    assert report.level_status(1) == "not_applicable"
    assert [report.level_status(level) for level in (2, 3, 4, 5)] == ["passed"] * 4
    assert "stage hooks" in next(r.message for r in report.results if r.level == 1)


def test_a_callable_is_held_to_promises_and_budget() -> None:
    report = run(exact, cases=[*FEW, "values/gaussian", "heads/dim_48", "extremes/scale_zero"])
    assert failures(report) == {} and report.recipe == "bf16"
    assert report.level_status(2) == report.level_status(3) == "not_applicable"
    assert report.count("passed", 5) > 3
    numbers = next(r.numbers for r in report.results if r.name == "values/gaussian:accuracy")
    assert 0 < numbers["out_worst_over_budget"] < 1 and "dq_worst_over_budget" not in numbers


@pytest.mark.parametrize(("recipe", "rows"), [("cudnn_mxfp8", 16), ("tile_32x32", 16), ("tensor_fp8", 32)])
def test_leaks_of_others_are_found_with_coordinate_distance_and_map(recipe: str, rows: int) -> None:
    """TransformerEngine issue 3248: V[16] = 1 changes the outputs of tokens 0 to 15, V[32] = 1 changes none."""
    report = run("reference", levels=[4], cases=["leak/transformer_engine_3248"], recipe=recipe)
    (result,) = report.results
    assert result.status == "failed" and result.coordinate == (0, 0, 0)
    assert result.numbers["smallest_distance"] == 1 and result.numbers["moved_rows"] == rows
    assert "v[16] = 1 from token 16 on moved out[0, 0, 0]" in result.message
    moved = result.arrays["leak_map"][0]
    assert (moved[:rows] > 0).all() and (moved[rows:32] == 0).all() and np.isnan(moved[32:]).all()


@pytest.mark.parametrize("recipe", ["cudnn_mxfp8", "tile_32x32", "tensor_fp8"])
def test_leaks_of_others_are_found_by_the_general_case(recipe: str) -> None:
    report = run("reference", levels=[4], cases=["leak/every_residue"], promises=["leak"], recipe=recipe)
    found = {r.check: r for r in report.results}
    assert found["leak"].status == "failed" and found["leak"].coordinate is not None
    assert found["suffix"].status == "not_applicable"


@dataclasses.dataclass
class Far(Target):
    """Exact attention, but token t moves the output of token t - 5."""

    name = "far"
    backward = lse = False

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False):
        results = ReferenceTarget("bf16").run(inputs)
        out = results.out.copy()
        out[:-5, 0, 0] = inputs.v[5:, 0, 0]
        return dataclasses.replace(results, out=out, lse=None)


def test_the_distance_of_a_leak_is_that_of_the_token_that_moves() -> None:
    report = run(Far(), levels=[4], cases=["leak/every_residue"], promises=["leak"])
    (result,) = [r for r in report.results if r.check == "leak"]
    assert result.status == "failed" and result.numbers["smallest_distance"] == 5


def test_a_recipe_whose_diagonal_tile_leaks_is_found() -> None:
    faulty = dataclasses.replace(RECIPES["mxfp8"], name="faulty", diagonal_values=None)
    report = run("reference", levels=[2, 4], cases=["leak/every_residue"], recipe=faulty)
    assert "leak/every_residue:leak" in failures(report)


def wrong_by(change):
    """The exact callable with a fault."""

    def faulty(q, k, v, cu_seqlens, *, causal, softmax_scale):
        out, lse = exact(q, k, v, cu_seqlens, causal=causal, softmax_scale=softmax_scale)
        return change(out, lse)

    faulty.tensors = "numpy"
    faulty.promises = exact.promises
    return faulty


def with_nan(out, lse):
    """A NaN in row 3."""
    return np.where(np.arange(len(out))[:, None, None] == 3, np.nan, out).astype(out.dtype), lse


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda out, lse: (out * bfloat16(1.04), lse), "accuracy"),
        (lambda out, lse: (out, lse / np.float32(np.log(2))), "accuracy"),
        (with_nan, "edges"),
        (lambda out, lse: (out, np.nan_to_num(lse, neginf=0)), "edges"),
        (lambda out, lse: (out[..., :32], lse), "edges"),
    ],
    ids=["scaled", "base two", "nan", "padding", "shape"],
)
def test_faults_of_callables_are_found(change, check: str) -> None:
    report = run(wrong_by(change), cases=["documents/padding", "values/lse"])
    assert any(name.endswith(check) for name in failures(report)), failures(report)


def test_an_exception_is_an_error_and_not_a_pass() -> None:
    def broken(q, k, v, cu_seqlens, *, causal, softmax_scale):
        if len(cu_seqlens) > 4:
            raise RuntimeError("no more than three documents")
        return exact(q, k, v, cu_seqlens, causal=causal, softmax_scale=softmax_scale)

    broken.tensors, broken.promises = "numpy", ()
    report = run(broken, levels=[5], cases=["documents/full_attention"])
    (result,) = report.results
    assert result.status == "error" and result.message == "RuntimeError: no more than three documents"
    assert not report.passed


def test_illegal_calls_that_are_accepted_are_listed() -> None:
    lenient = CallableTarget(exact)
    lenient.promises = frozenset({"validation"})
    report = run(lenient, levels=[4], cases=["arguments/malformed"])
    assert report.passed  # the oracle checks its arguments

    def careless(q, k, v, cu_seqlens, *, causal, softmax_scale):
        return np.zeros_like(q)

    careless.tensors = "numpy"
    (result,) = run(careless, levels=[4], cases=["arguments/malformed"]).results
    assert result.status == "failed" and "softmax_scale -0.125" in result.message


class Fragile(Target):
    """Ends its device on the second illegal call, as a kernel does that reads out of bounds."""

    name = "fragile"
    backward = lse = False
    alive = True

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False):
        if inputs.cu_seqlens.tolist() == [0, 30, 20, 50]:
            self.alive = False
        if not self.alive:
            raise RuntimeError("an illegal memory access was encountered")
        return dataclasses.replace(ReferenceTarget("bf16").run(inputs.replace(cu_seqlens=np.array([0, 50]))), lse=None)

    def is_alive(self) -> bool:
        return self.alive


def test_illegal_calls_come_last_and_a_lost_device_is_not_a_refusal() -> None:
    cases = ["arguments/malformed", "values/ones"]
    report = run(Fragile(), levels=[4, 5], cases=cases, promises=["validation"])
    by_name = {r.name: r for r in report.results}
    malformed = by_name["arguments/malformed:validation"]
    assert malformed.status == "failed" and "cu_seqlens [0, 30, 20, 50] was accepted and ended" in malformed.message
    assert "illegal memory" not in by_name["values/ones:accuracy"].message


def test_after_the_device_is_lost_nothing_is_reported_as_wrong() -> None:
    target = Fragile()
    target.alive = False
    report = run(target, levels=[5], cases=["documents/padding", "values/ones"])
    assert [r.status for r in report.results] == ["error", "not_applicable"]
    assert report.results[1].message == "not run: the device was lost in level 5 documents/padding:accuracy"


def test_stop_at_the_first_failure_and_progress() -> None:
    seen = []
    report = run(
        "reference",
        levels=[4],
        cases=["leak/*"],
        recipe="tile_32x32",
        stop_on_failure=True,
        progress=lambda result, done, total: seen.append((result.name, done, total)),
    )
    assert len(report.results) == len(seen) < seen[0][2]
    assert [done for _, done, _ in seen] == list(range(1, len(seen) + 1))


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="levels must be some of"):
        run("reference", levels=[6])
    with pytest.raises(ValueError, match="got 'no-such-target'"):
        run("no-such-target")
    with pytest.raises(ValueError, match=r"got 'flamia\.reference:nothing'"):
        resolve_target("flamia.reference:nothing")
    with pytest.raises(ValueError, match=r"promises must be some of .*, got \['honour'\]"):
        run("reference", promises=["honour"])
    with pytest.raises(TypeError, match="target must be callable"):
        run(3)


def test_a_vendor_that_is_missing_says_so() -> None:
    with pytest.raises(TargetUnavailableError, match="not installed"):
        resolve_target("flash-attn")


@pytest.mark.parametrize(
    "target", ["reference", "simulator:sm_100a", ReferenceTarget("bf16")], ids=["name", "simulator", "instance"]
)
def test_a_device_that_a_target_does_not_run_on_is_no_silent_choice(target) -> None:
    if isinstance(target, str) and target.startswith("simulator"):
        pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"device must be 'cpu' for target .*, which runs on the CPU, got 'cuda'"):
        resolve_target(target, device="cuda")
    assert resolve_target(target, device="cpu").device == "cpu"


@pytest.mark.parametrize("device", ["gpu0", "", "cuda:", "cuda:x", "cuda:1 ", "CUDA"])
def test_devices_have_three_forms(device) -> None:
    with pytest.raises(ValueError, match="device must be 'cpu', 'cuda' or 'cuda:N', got "):
        resolve_target(exact, device=device)


def test_torch_targets_say_what_is_missing() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")

    def attend(q, k, v, cu_seqlens, *, causal, softmax_scale):
        return q

    for target, name in (("torch-sdpa", "torch-sdpa"), ("torch-sdpa-cudnn", "torch-sdpa-cudnn"), (attend, "attend")):
        with pytest.raises(TargetUnavailableError) as caught:
            resolve_target(target, device="cuda")
        assert str(caught.value) == f"{name} cannot run here: PyTorch finds no CUDA device"
    with pytest.raises(TargetUnavailableError, match="torch-varlen runs on CUDA only: device must be 'cuda' or"):
        resolve_target("torch-varlen")


def test_a_target_by_import_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from flamia.reference import attention_forward\n"
        "def attend(q, k, v, cu_seqlens, *, causal, softmax_scale):\n"
        "    f = attention_forward(q, k, v, cu_seqlens, causal=causal, softmax_scale=softmax_scale)\n"
        "    return f.out\n"
        "attend.tensors = 'numpy'\n"
    )
    monkeypatch.chdir(tmp_path)
    target = resolve_target("mine:attend", recipe="mxfp8")
    assert target.name == "mine:attend" and not target.lse and not target.backward
    assert run(target, cases=["documents/padding"], promises=["edges"]).passed

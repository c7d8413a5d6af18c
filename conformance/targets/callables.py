"""Any callable or object as a target.

Note [Targets]
~~~~~~~~~~~~~~
A *callable* ``f(q, k, v, cu_seqlens, *, causal, softmax_scale)`` returns ``out`` or ``(out, lse)``. If it takes torch
tensors and its output requires a gradient, autograd gives the gradients.

An *object* has ``forward(q, k, v, cu_seqlens, *, causal, softmax_scale) -> (out, lse, saved)`` (lse may be None) and
``backward(dout, saved) -> (dq, dk, dv)``; optionally ``stages(saved) -> (arrays, tiles)``, where saved is what
``backward`` saw, and ``plan(cu_seqlens, heads, dim, causal)``, both as `stages` describes. ``differentiable = False``
says that it has no gradients on this device.

Tensors are packed, ``(T, H, D)``; lse is float32 ``(Hq, T)``, natural logarithm; ``cu_seqlens`` is int32
``(documents + 1,)`` on the device of the tensors; softmax_scale is a float. Attributes of the callable or object, all
optional, say more:

=============  ==================================================================================================
``tensors``    ``"torch"`` (default where PyTorch is installed) or ``"numpy"`` (bfloat16 is then ml_dtypes')
``recipe``     name of the recipe whose bits or budget it is held to; default ``"bf16"``
``profile``    machine profile of the same; default ``"ideal"``
``bits``       True if it promises the reference's bits under them; default False
``promises``   the level-4 checks it claims, keys of `base.PROMISES`; default: all
``graphs``     False if it cannot be captured in a CUDA graph; default: True
``dtypes``     what it takes, of ``("bfloat16", "float32")``; default: both
``name``       for reports
=============  ==================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia.conformance.calls import Array, Inputs, Results
from flamia.conformance.targets.base import PROMISES, Target, TargetUnavailableError, package_versions, require_promises


class CallableTarget(Target):
    """A callable or an object of Note [Targets].

    Whether it returns LSE and has gradients is found out by a small call, at the first question.

    :param device: of torch tensors: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
    """

    def __init__(self, subject: Any, name: str | None = None, device: str = "cpu") -> None:
        self.subject = subject
        self.forward_call = getattr(subject, "forward", subject)
        if not callable(self.forward_call):
            raise TypeError(f"target must be callable or have forward and backward, got {type(subject).__name__}")
        own_name = getattr(subject, "name", getattr(subject, "__name__", type(subject).__name__))
        self.name = str(name or own_name)
        self.recipe = getattr(subject, "recipe", "bf16")
        self.profile = getattr(subject, "profile", "ideal")
        self.bits = bool(getattr(subject, "bits", False))
        self.promises = require_promises(getattr(subject, "promises", PROMISES))
        self.has_object = hasattr(subject, "forward") and hasattr(subject, "backward")
        self.dtypes = tuple(getattr(subject, "dtypes", self.dtypes))
        self.stages = hasattr(subject, "stages")
        self.device = device
        self.tensors = getattr(subject, "tensors", "torch" if find_spec("torch") else "numpy")
        if self.tensors not in ("torch", "numpy"):
            raise ValueError(f"target.tensors must be 'torch' or 'numpy', got {self.tensors!r}")
        if self.tensors == "torch" and not find_spec("torch"):
            raise TargetUnavailableError(f"target {self.name} takes torch tensors: pip install torch")
        if self.tensors == "numpy" and device != "cpu":
            raise ValueError(f"device must be 'cpu' for a target that takes NumPy arrays, got {device!r}")

    def require_device(self) -> None:
        """The CUDA device, for torch tensors that shall lie on one."""
        if self.device != "cpu":
            from flamia.conformance.targets.tensors import find_cuda

            find_cuda(self.name, self.device)

    @cached_property
    def _offers(self) -> dict[str, bool]:
        """What a call of 128 tokens returns."""
        rng = np.random.default_rng(0)
        from ml_dtypes import bfloat16

        q, k, v, dout = (rng.standard_normal((128, 1, 64), np.float32).astype(bfloat16) for _ in range(4))
        inputs = Inputs(q, k, v, dout, np.array([0, 128], np.int64))
        if self.has_object:
            lse = self._run_object(inputs, False, False).lse is not None
            return {"lse": lse, "backward": bool(getattr(self.subject, "differentiable", True))}
        try:
            returned = self._call(self._arguments(inputs, gradients=True))
        except Exception:  # an inference kernel may refuse tensors that require gradients
            returned = self._call(self._arguments(inputs, gradients=False))
        out, lse_tensor = _split(returned)
        return {"lse": lse_tensor is not None, "backward": bool(getattr(out, "requires_grad", False))}

    @property
    def lse(self) -> bool:  # type: ignore[override]
        """Whether results have LSE."""
        return self._offers["lse"]

    @property
    def backward(self) -> bool:  # type: ignore[override]
        """Whether gradients can be had."""
        return self._offers["backward"]

    def run(self, inputs: Inputs, *, backward: bool = False, stages: bool = False) -> Results:
        """One call."""
        if self.has_object:
            return self._run_object(inputs, backward, stages)
        arguments = self._arguments(inputs, gradients=backward)
        out, lse = _split(self._call(arguments))
        gradients: Sequence[Any] = ()
        if backward:
            import torch

            dout = self._tensor(inputs.dout)
            gradients = torch.autograd.grad(out, arguments["tensors"], dout, materialize_grads=True)
        return self._results(out, lse, gradients)

    def plan(
        self, cu_seqlens: NDArray[np.int64], heads: tuple[int, int], dim: int, causal: bool
    ) -> Mapping[str, Array] | None:
        """The object's plan, if it has one."""
        if not hasattr(self.subject, "plan"):
            return None
        found = self.subject.plan(cu_seqlens, heads, dim, causal)
        return {name: self._array(x) for name, x in found.items()}

    def replay(self, first: Inputs, second: Inputs) -> Results | None:
        """A captured graph on other contents; None off a CUDA device, or if the subject says so."""
        if not (self.tensors == "torch" and self.device.startswith("cuda") and getattr(self.subject, "graphs", True)):
            return None
        from flamia.conformance.targets.tensors import replay_graph

        arguments = self._arguments(first, gradients=False)
        fresh = [getattr(second, name) for name in ("q", "k", "v")]
        out, lse = _split(replay_graph(lambda: self._call(arguments), arguments["tensors"], fresh, self.device))
        return self._results(out, lse, ())

    def is_alive(self) -> bool:
        """Whether the CUDA context survived."""
        if self.tensors != "torch" or not self.device.startswith("cuda"):
            return True
        from flamia.conformance.targets.tensors import context_survives

        return context_survives(self.device)

    def environment(self) -> dict[str, str]:
        """Versions; for torch its device too."""
        found = super().environment()
        if self.tensors == "torch":
            from flamia.conformance.targets.tensors import describe_device

            found |= package_versions("torch", "triton") | describe_device(self.device)
        for name in getattr(self.subject, "packages", ()):
            found |= package_versions(name)
        return found

    def _run_object(self, inputs: Inputs, backward: bool, stages: bool) -> Results:
        out, lse, saved = self._call(self._arguments(inputs, gradients=False))
        gradients = self.subject.backward(self._tensor(inputs.dout), saved) if backward else ()
        arrays, tiles = self.subject.stages(saved) if stages else ({}, {})
        return replace(
            self._results(out, lse, gradients),
            arrays={name: self._array(x) for name, x in arrays.items()},
            tiles={name: {key: self._array(x) for key, x in found.items()} for name, found in tiles.items()},
        )

    def _results(self, out: Any, lse: Any, gradients: Sequence[Any]) -> Results:
        dq, dk, dv = (self._array(x) for x in gradients) if gradients else (None, None, None)
        return Results(self._array(out), None if lse is None else self._array(lse), dq, dk, dv)

    def _arguments(self, inputs: Inputs, gradients: bool) -> dict[str, Any]:
        tensors = [self._tensor(x, gradients) for x in (inputs.q, inputs.k, inputs.v)]
        cu: Any = inputs.cu_seqlens.astype(np.int32)
        if self.tensors == "torch":
            import torch

            cu = torch.from_numpy(cu).to(self.device)
        scale = 1.0 / math.sqrt(inputs.head_dim) if inputs.softmax_scale is None else inputs.softmax_scale
        return {"tensors": tensors, "cu_seqlens": cu, "causal": inputs.causal, "softmax_scale": scale}

    def _call(self, arguments: dict[str, Any]) -> Any:
        options = {name: arguments[name] for name in ("causal", "softmax_scale")}
        return self.forward_call(*arguments["tensors"], arguments["cu_seqlens"], **options)

    def _tensor(self, x: Array, gradient: bool = False) -> Any:
        if self.tensors == "numpy":
            return x
        from flamia.conformance.targets.tensors import to_torch

        found = to_torch(x, self.device)
        return found.requires_grad_() if gradient else found

    def _array(self, x: Any) -> Array:
        if isinstance(x, np.ndarray):
            return x.copy()  # the next call may overwrite it
        from flamia.conformance.targets.tensors import to_numpy

        return to_numpy(x).copy()


def _split(returned: Any) -> tuple[Any, Any]:
    """``(out, lse)`` of what a callable returned."""
    if isinstance(returned, (tuple, list)):
        if len(returned) != 2:
            raise TypeError(f"target must return out or (out, lse), got {len(returned)} values")
        return returned[0], returned[1]
    return returned, None

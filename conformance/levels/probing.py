"""Level 0: the probes of the chip that the target runs on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from flamia.conformance.levels.check import Check, Context, Outcome, not_applicable


def plan_probes(context: Context) -> list[Check]:
    """One check per probe of the chip; a single one that is not applicable where there is none."""
    device = context.target.device
    reason = _missing(device)
    if reason is not None:
        return [Check(0, "probes", "probe", partial(not_applicable, reason))]
    import torch

    from flamia.conformance.probes import conversions_of, machines_of, probes_of

    capability = torch.cuda.get_device_capability(device)
    found: dict[str, dict[str, Callable[[str], Outcome]]] = {
        machine.name: dict(probes_of(machine)) for machine in machines_of(capability)
    }
    if not found:
        reason = f"there are no probes for compute capability {capability[0]}.{capability[1]}"
        return [Check(0, "probes", "probe", partial(not_applicable, reason))]
    found["conversions"] = conversions_of(capability)
    return [
        Check(0, f"probes/{group}", name, partial(probe, device))
        for group, probes in found.items()
        for name, probe in probes.items()
    ]


def _missing(device: str) -> str | None:
    """Why no probe can run, if none can."""
    if not device.startswith("cuda"):
        return "probes run on a CUDA device only"
    for module in ("torch", "cupy"):
        if find_spec(module) is None:
            return f"probes need {module}: pip install 'flamia[cuda,torch]'"
    return None

"""What to look at after a simulation: timelines, instruction counts, a cycle model, sweeps over seeds."""

from flamia.conformance.simulator.tools.counts import count_by_role
from flamia.conformance.simulator.tools.cycles import estimate_cycles
from flamia.conformance.simulator.tools.sweep import Sweep, sweep
from flamia.conformance.simulator.tools.timeline import draw_timeline, format_timeline

__all__ = ["Sweep", "count_by_role", "draw_timeline", "estimate_cycles", "format_timeline", "sweep"]

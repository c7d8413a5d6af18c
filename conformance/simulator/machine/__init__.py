"""The machine: memory, warps, CTAs, the scheduler."""

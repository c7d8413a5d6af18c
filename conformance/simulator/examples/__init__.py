"""Kernels to look at on the simulator, and to plant faults in."""

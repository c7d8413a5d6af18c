"""Agreement of the simulator with a real chip: generated kernels, run on both, compared bit for bit."""

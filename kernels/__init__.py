"""The room of the CUDA kernels: CUDA C++ sources, their compilation by NVRTC, their launch through CuPy, and the
device schedule. It imports nothing of FLAMIA but itself."""

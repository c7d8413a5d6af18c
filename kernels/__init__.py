"""The room of the CUDA kernels: CUDA C++ sources, their compilation by NVRTC, their launch through CuPy, and the
device schedule. It imports nothing of FLAMIA but itself; PyTorch and CuPy only inside the functions that launch.

========================  =========================================================================================
`registry`                the kernels as literals: sources, entries, parameters, limits
`nvrtc`, `build`          from a source to PTX and machine code, held to the limits; no GPU needed
`cache`                   compiled kernels on disk
`disassembly`             machine code as text and as histograms
`launch`                  machine code on PyTorch's current stream
`structs`, `tensors`      what is passed to a kernel
`schedule`                tile table and work items of a pack, on the device
`quantize`                q, k, v and dout as payload and scale tiles, and the backward's row pre-pass
`epilogue`                gradients from FP32 tiles; tiles back to tokens
`conversions`             every number conversion of the kernels, for tests and probes
========================  =========================================================================================
"""

"""Benchmarks, side by side in one run: `command` is ``flamia bench``.

`attention` times the reference beside PyTorch, `fake_quant` is the implementation it is compared with, `memory`,
`quantization` and `bit_accurate` measure the other promises.
"""

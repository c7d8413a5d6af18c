"""The tensor cores as functions of bytes: descriptors, layouts of shared and tensor memory, evaluation of one MMA.

Nothing here knows of threads or of time; `flamia.conformance.simulator.ops` gives it operands and decides when.
Every rule is taken from the PTX ISA 9.0 text, sections 9.7.15 (wgmma) and 9.7.16 (tcgen05); where that text gives a
layout as a figure only, the formula is that of the CuTe layout which CUTLASS uses for the same instruction.
"""

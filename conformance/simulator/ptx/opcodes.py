"""The closed list of base opcodes. What is not here, `parse` refuses by name."""

from __future__ import annotations

ARITHMETIC = (
    "abs add addc copysign div dp2a dp4a fma mad mad24 madc max min mul mul24 neg rem sad sub subc "
    "ex2 lg2 rcp rsqrt sin cos sqrt tanh testp".split()
)
BITS = "and or xor not cnot shl shr shf lop3 prmt bfe bfi bfind bmsk brev clz popc fns szext".split()
COMPARISON = "set setp selp slct".split()
MOVEMENT = (
    "mov cvt cvta ld ldu st atom red isspacep mapa getctarank prefetch prefetchu applypriority discard "
    "createpolicy".split()
)
CONTROL = "bra call ret exit trap brkpt bar barrier nanosleep pmevent".split()
COLLECTIVE = "shfl vote match activemask redux elect ldmatrix stmatrix movmatrix".split()
ASYNCHRONOUS = "cp mbarrier fence membar wgmma tcgen05 griddepcontrol setmaxnreg".split()

OPCODES = frozenset(ARITHMETIC + BITS + COMPARISON + MOVEMENT + CONTROL + COLLECTIVE + ASYNCHRONOUS)
"""Every base opcode that this machine knows; the forms of each are held by its instruction family."""

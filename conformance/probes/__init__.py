"""Level 0: the machine model against the chip.

The profiles of the reference rest on a model of each chip's tensor cores and conversions. These probes hold the model
against the chip at hand, bit for bit; they run on a CUDA device only. Which there are depends on the chip:

=============================  ===============================================================================
``probes/e4m3``, ``exp2``      every supported chip: E4M3 conversion, the FMA exponential
``probes/wgmma_...``           Hopper: bfloat16 and E4M3 products
``probes/tcgen05_...``         Blackwell: MXFP8, NVFP4 and bfloat16 products, E2M1 and E8M0 conversion
=============================  ===============================================================================
"""

from flamia.conformance.probes.conversions import conversions_of
from flamia.conformance.probes.machines import Machine, machines_of
from flamia.conformance.probes.products import probes_of

__all__ = ["Machine", "conversions_of", "machines_of", "probes_of"]

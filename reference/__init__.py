"""The executable specification of FLAMIA's numerics, in NumPy and ml_dtypes.

One concept per module: `formats` and `scaling` (elements, scales, token blocks), `nvfp4`, `documents`, `layout` (tiles
in memory), `schedule`, `exp2`, `tensorcore` (bit-accurate MMA steps), `profiles` (machines), `recipes`,
`probabilities`, `forward`, `backward`, and `oracle` (float64). Kernels are compared with these functions, stage by
stage, byte by byte.
"""

from flamia.reference import layout, recipes, schedule
from flamia.reference.backward import Gradients, attention_backward
from flamia.reference.forward import Forward, attention_forward
from flamia.reference.oracle import Oracle, attention_oracle
from flamia.reference.profiles import PROFILES, Profile
from flamia.reference.recipes import RECIPES, Recipe, Scaling

__all__ = [
    "PROFILES",
    "RECIPES",
    "Forward",
    "Gradients",
    "Oracle",
    "Profile",
    "Recipe",
    "Scaling",
    "attention_backward",
    "attention_forward",
    "attention_oracle",
    "layout",
    "recipes",
    "schedule",
]

"""Workloads of recorded activations: the values of a file in place of standard normal ones.

Note [Recorded workloads]
~~~~~~~~~~~~~~~~~~~~~~~~~
A file's documents, each whole, are repeated as a list until the pack has about `PACK_TOKENS` tokens; a file with more
is taken as it is. So the heads, the lengths and the values are the file's, rounded to bfloat16.

A benchmark needs several sets of inputs with the same documents. Set i has the KV heads, each with its query heads,
rotated by i; and after as many sets as there are KV heads, the channels of all tensors rotated by one block of 32 more.
Hence each set is the same attention with its numbers in other places: no set is easier than another, and the blocks of
32 channels that share a scale stay together. After ``KV heads * (D / 32)`` sets the first one comes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flamia.bench.gpu_attention import Workload
from flamia.study.sample import TENSORS, Sample, load

PACK_TOKENS = 32768
BLOCK = 32
PACKAGED = "sample"
"""Stands for the package's sample where a file may be named."""


@dataclass(frozen=True)
class Recorded:
    """A file's activations as a workload, which is named ``real-<file stem>``.

    :param repeats: of the list of documents.
    """

    workload: Workload
    sample: Sample
    repeats: int

    def sets(self, count: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """So many sets of q, k, v and dout, bfloat16: Note [Recorded workloads]."""
        kv_heads, dim = self.sample.k.shape[1:]
        pack = [np.tile(getattr(self.sample, name).astype(bfloat16), (self.repeats, 1, 1)) for name in TENSORS]
        for i in range(count):
            turns, heads = divmod(i, kv_heads)
            channels = turns * BLOCK % dim
            yield tuple(np.roll(x, (heads * x.shape[1] // kv_heads, channels), (1, 2)) for x in pack)


def read_recorded(source: str) -> Recorded:
    """The workload of a file.

    :param source: path of an ``.npz`` file as `flamia.study.sample` describes it, or ``"sample"``: the package's.
    :raises ValueError, TypeError: naming the file, the key, its value and what is allowed.
    """
    packaged = source == PACKAGED
    sample = load(None if packaged else source)
    dim = sample.q.shape[2]
    if dim % BLOCK:
        raise ValueError(f"{source}: q must have a head_dim that is a multiple of {BLOCK}, got {dim}")
    repeats = max(1, round(PACK_TOKENS / int(sample.cu_seqlens[-1])))
    lengths = tuple(n for n in sample.lengths if n) * repeats
    name = f"real-{PACKAGED if packaged else Path(source).stem}"
    workload = Workload(name, lengths, *sample.head_counts, dim, source=sample.source)
    return Recorded(workload, sample, repeats)

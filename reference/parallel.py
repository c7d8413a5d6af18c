"""Running independent pieces of the engine on all cores.

NumPy releases the GIL inside its loops and BLAS calls, so plain threads do. BLAS itself is held to one thread
meanwhile: its products are 128x128x128 here, too small to share, and its waiting threads would take the cores from the
others. No result depends on the number of threads: pieces write disjoint rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

_lock = Lock()
_users = 0
_limit: Any = None


def worker_count() -> int:
    """Threads to use: the cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(pieces: Iterable[Callable[[], None]], workers: int | None = None) -> None:
    """Call every piece, on ``workers`` threads (default: `worker_count`). The first exception is raised."""
    todo = list(pieces)
    count = min(worker_count() if workers is None else workers, len(todo))
    with one_blas_thread():
        if count <= 1:
            for piece in todo:
                piece()
            return
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(piece) for piece in todo]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()


quiet = np.errstate(all="ignore")
"""Decorator of a piece: overflow and NaN are results here, not accidents (error state is per thread)."""


@cache
def _controller() -> Any:
    return ThreadpoolController()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread while anyone is inside; the last one out restores the process's setting.

    Changing the setting costs more than a small product: around many short calls, hold it outside.
    """
    global _users, _limit
    with _lock:
        if _users == 0:
            _limit = _controller().limit(limits=1, user_api="blas")
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _limit.restore_original_limits()

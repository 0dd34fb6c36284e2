"""A random stream is a function of (seed, purpose, round, client), and does not depend on what ran before.

So a run gives the same bits with any number of workers, and a resumed run needs no saved generator.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def _sequence(seed: int, purpose: str, round_: int, client: int) -> np.random.SeedSequence:
    key = [seed, zlib.crc32(purpose.encode()), round_, client]
    # an array gives the same result as the list, and is read faster
    return np.random.SeedSequence(np.array(key, np.uint32) if 0 <= min(key) <= max(key) < 2**32 else key)


def stream(seed: int, purpose: str, round_: int = 0, client: int = 0) -> np.random.Generator:
    """The random stream for one purpose, round and client."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, round_, client)))


def torch_seed(seed: int, purpose: str, round_: int = 0, client: int = 0) -> int:
    """A seed for torch with the same key."""
    return int(_sequence(seed, purpose, round_, client).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def torch_stream(seed: int, purpose: str, round_: int = 0, client: int = 0) -> Iterator[None]:
    """Within the block, torch's global CPU generator is the keyed stream; afterwards it is restored.

    For code that does not take a generator, such as the initialisation of a module.
    """
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed: that seeds every device's generator too, and formats the stack for each kind of them
        torch.default_generator.manual_seed(torch_seed(seed, purpose, round_, client))
        yield

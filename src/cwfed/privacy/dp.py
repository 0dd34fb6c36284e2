"""Differential privacy for a client's samples: DP-SGD. Abadi et al., Deep Learning with Differential Privacy, 2016.

Every sample is in a batch with probability q = B / n_i, independently (Poisson sampling). With g_s the gradient of sample s,

    g = (sum_s g_s min(1, clip / ||g_s||) + noise * clip * N(0, I)) / B

replaces the mean gradient. Two data sets of a client are neighbours if one has one sample more. After T steps, the models that the client
has sent are (epsilon, delta)-private, with the epsilon that Opacus' RDP accountant gives for (noise, q, T); q, T and n_i are public.

WDR's penalty depends on the client's class distribution, which is private and not a sum over samples, so clipping does not cover it. It is
computed from a noisy histogram instead that is drawn once, counts_j + Laplace(1 / e), which is (e, 0)-private, as one sample changes one count
by 1. Whatever is computed from it later costs nothing more; the two epsilons add up.

All of this holds against anybody who cannot reproduce the noise (`noise.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cwfed.core.errors import ConfigError
from cwfed.core.events import Spent
from cwfed.privacy.noise import Draws, Noise, Normals

SIMULATED = "a simulation: its noise comes from run.seed, and who knows that can subtract it"


@dataclass(frozen=True)
class SamplePrivacy:
    """The strength of DP-SGD at a client."""

    clip: float
    """The longest gradient that a sample may have."""
    noise: float
    """The noise multiplier, sigma: standard deviation of the noise in units of `clip`; 0 guarantees nothing."""
    delta: float
    histogram: float
    """The epsilon spent on the class histogram; 0 releases none."""

    def epsilon(self, samples: int, batch_size: int, steps: int) -> float | None:
        """The epsilon of so many steps of a client with so many samples; None: without bound."""
        epsilon = dp_sgd_epsilon(((self.noise, rate(samples, batch_size), steps),), self.delta)
        return None if epsilon is None else epsilon + self.histogram

    def class_counts(self, counts: NDArray[np.int64], noise: Noise, client: int) -> Tensor:
        """The client's noisy histogram. The noise is the same in every round, so its epsilon is spent once."""
        if not self.histogram:
            raise ConfigError(
                "privacy.dp: the algorithm uses the client's class distribution (WDR, or class counts that are sent), which clipped "
                "gradients do not cover: set privacy.dp_histogram, the epsilon of a noisy histogram, or algorithm.wdr = 0"
            )
        return noisy_histogram(counts, noise.histogram(len(counts), client), self)


def noisy_histogram(counts: NDArray[np.int64], drawn: NDArray[np.float64], how: SamplePrivacy) -> Tensor:
    """max(0, n_j + z_j / e) with z_j from the standard Laplace distribution; equal counts if all become 0."""
    noisy = np.maximum(0, counts + drawn / how.histogram)
    return torch.from_numpy(noisy if noisy.sum() > 0 else np.ones_like(noisy)).float()


def rate(samples: int, batch_size: int) -> float:
    """q: the probability that a sample is in a batch."""
    return min(batch_size, samples) / samples


def poisson_batches(samples: int, batch_size: int, epochs: int, rng: Draws) -> list[NDArray[np.int64]]:
    """As many batches as there are full ones in these epochs; each sample is in each with probability batch_size / samples."""
    chance = rate(samples, batch_size)
    return [
        np.flatnonzero(rng.random(samples) < chance) for _ in range(steps_of_a_round(samples, batch_size, epochs))
    ]


def private_sum(gradients: Sequence[Tensor], how: SamplePrivacy, normals: Normals) -> list[Tensor]:
    """sum_s g_s min(1, clip / ||g_s||) + noise * clip * N(0, I), from per-sample gradients (samples first)."""
    norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    factors = (how.clip / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1)
    sums = [torch.tensordot(factors, g, dims=1) for g in gradients]
    if how.noise:
        for total in sums:
            total.add_(normals(total), alpha=how.noise * how.clip)
    return sums


def check_model(model: nn.Module) -> None:
    """ConfigError for networks that mix samples, or for which noise would drown the signal."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            raise ConfigError("privacy.dp cannot be used with BatchNorm layers, which mix the samples of a batch")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ConfigError(
                "privacy.dp cannot be used with embeddings: noise on every word of the vocabulary would drown the few of a text"
            )


def steps_of_a_round(samples: int, batch_size: int, epochs: int) -> int:
    """The number of full batches in these epochs; a client smaller than a batch has one per epoch, of all its samples."""
    return epochs * (samples // min(batch_size, samples))


def spent(how: SamplePrivacy, visits: Mapping[int, tuple[int, int]], batch_size: int, epochs: int) -> Spent:
    """What training cost, from the rounds that each client took part in and its number of samples."""
    epsilon = {
        str(client): how.epsilon(samples, batch_size, times * steps_of_a_round(samples, batch_size, epochs))
        for client, (times, samples) in visits.items()
    }
    return Spent(how.delta, epsilon, how.histogram, SIMULATED)


def promise(spent: Spent, rounds: int) -> str:
    """A note before round 1 about the guarantee after the last round."""
    known = [e for e in spent.epsilon.values() if e is not None]
    if not known:
        return "privacy.dp_noise = 0: gradients are clipped, but nothing is guaranteed"
    return (
        f"differential privacy of every sample: epsilon {min(known):.2f} to {max(known):.2f} by client, "
        f"delta {spent.delta:g}, after {rounds} rounds; {spent.known}"
    )


def require_budget(spent: Spent, budget: float) -> None:
    """ConfigError if a client would spend more than the budget; 0: any."""
    for client, epsilon in spent.epsilon.items():
        if budget and (epsilon is None or epsilon > budget):
            would = "without bound" if epsilon is None else f"{epsilon:.2f}"
            raise ConfigError(
                f"privacy.dp_budget = {budget:g}, but epsilon of client {client} would be {would} after all rounds: take more "
                "noise (privacy.dp_noise), fewer rounds, or a larger budget"
            )


@lru_cache(maxsize=4096)
def dp_sgd_epsilon(trained: tuple[tuple[float, float, int], ...], delta: float) -> float | None:
    """Epsilon by Opacus' RDP accountant, an upper bound for DP-SGD with Poisson sampling; None if some steps have no noise.

    `trained` has (noise, q, steps) for each training.
    """
    if any(noise == 0 for noise, _, _ in trained):
        return None
    try:
        from opacus.accountants import RDPAccountant
    except ImportError:
        raise ConfigError(
            "privacy.dp needs Opacus, whose accountant gives epsilon: pip install 'cwfed[privacy]'"
        ) from None
    accountant = RDPAccountant()
    accountant.history = list(trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best order lies at the end of its list: the bound holds, if not tightly
        return float(accountant.get_epsilon(delta=delta))

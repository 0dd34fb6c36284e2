"""cwRows. This library, Class-wise rows of one shared model, 2026.

cwFedAvg's idea, to average a class over those who have it, without K models, a regulariser or mixing: one model for all, whose output layer is averaged row by row.

    loss     CE(z + log pi_c, y)                  pi_ck = (n_ck + eps) / (n_c + K eps)
             1. W for head_epochs, phi fixed      2. phi for train.epochs, W fixed
    rows     R~_k = sum_c q_ck W_ck               q_ck = n_ck / sum_c n_ck: over the owners of class k, weight and bias
    body     phi~ = sum_c p_c phi_c
    server   m <- beta m + (w~ - w)               w <- w + m, with w = (phi, R)
    y^       = argmax_k z_k + log pi_ck           on the client

phi is the body, W the output layer with rows W_k, p_c = n_c / n a client's share of the samples, n_ck its samples of class k, beta the server's momentum. A class that nobody of a round
owns has no step of its own in it; what momentum is left of earlier rounds still moves its row.

With the balanced loss (logit adjustment) classes that a client lacks get almost no gradient, so nobody pushes down rows that are not its own; averaged over its owners a row moves
as far as they say. Fitted to one received body first, all W_c are classifiers of one feature space, and so is their mean. What is left for a client's own distribution is its prior, which it adds
itself and which never has to be sent.

Limiting cases: it is `fedavg+balanced+fedopt+head_first+owners` with server_momentum = 0.5, bit for bit. With server_momentum = 0 and clients that have equally many
samples of every class it is `fedavg+head_first` (but for rounding); a class with one owner has its owner's row where server_momentum = 0.

The server learns the label counts of every participant (owners = "updates": what it can read off row updates). A client that claims a class takes its row: `class_cap` and `guard.norm_bound`
bound that (docs/security.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cwfed.algorithms.plugins.balanced import Balanced
from cwfed.algorithms.plugins.fedopt import FedOpt
from cwfed.algorithms.plugins.head_first import HeadFirst
from cwfed.algorithms.plugins.owners import Owners


@dataclass(frozen=True)
class CwRows(Balanced, FedOpt, HeadFirst, Owners):
    """One model whose output rows are averaged over the owners of their class, under a loss balanced by the client's prior."""

    name: ClassVar[str] = "cwrows"
    travels: ClassVar[str] = "2 models a participant: one down, one up, and K label counts"
    work: ClassVar[str] = (
        "client: head_epochs more passes, through the output layer only; server: one more model, and a mean per class"
    )

    server_momentum: float = 0.5
    """How much of the last round's step stays in this one's."""

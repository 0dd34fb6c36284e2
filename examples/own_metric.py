"""An own metric: sums over samples, which add up over batches and clients, and the number that they make.

The same from the command line, in this folder: cwfed run --set 'run.metrics=["own_metric:top2"]' --set run.pick=top2
"""

import torch
from torch import Tensor

import cwfed


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    among = (logits.topk(2).indices == labels[:, None]).any(1)
    return torch.stack([among.sum(), torch.tensor(len(labels))])


top2 = cwfed.Metric(sums=hits, value=lambda sums: sums[0] / sums[1])

if __name__ == "__main__":
    settings = ['run.metrics=["own_metric:top2"]', "run.pick=top2", "train.rounds=10", "train.lr=0.05"]
    summary = cwfed.run(cwfed.load_config(settings=settings))
    print(f"among the best two: {summary.metrics.received['top2'].best:.1%}")

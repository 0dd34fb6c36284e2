"""The curves of docs/privacy.md: what uploads leak against accuracy, and accuracy against epsilon.

    python benchmarks/privacy_curves.py dial dp draw --data-dir DATA --runs runs/privacy --docs docs

CIFAR-10, 4,000 samples, 20 clients, the paper's CNN. Runs that are there are not run again; `cwfed privacy` shows any of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cwfed
from cwfed import config as configs

BASE = ["data.name=cifar10", "data.samples=4000", "data.clients=20", "model.name=cnn", "run.save_models=none"]
DIRICHLET = ["data.partition=dirichlet", "data.alpha=0.1"]
PATHOLOGICAL = ["data.partition=pathological", "data.classes_per_client=2"]
METHODS = {
    "FedAvg": ["algorithm.name=fedavg"],
    "cwFedAvg without WDR": ["algorithm.name=cwfedavg", "algorithm.wdr=0"],
    "cwFedAvg": ["algorithm.name=cwfedavg"],
}
LEAK = [*DIRICHLET, "train.rounds=25", "train.lr=0.05"]
DIAL = {f"noise {s:g}": ["privacy.norms=noise", f"privacy.norm_noise={s}"] for s in (0.3, 1.0, 0.1)}
DIAL |= {f"levels {n}": ["privacy.norms=coarse", f"privacy.norm_levels={n}"] for n in (2, 1)}
# The noise's length grows with the root of the number of parameters and shrinks with the batch: a smaller network, larger batches.
DP = [
    *PATHOLOGICAL,
    "model.options.hidden=64",
    "train.batch_size=50",
    "train.lr=0.5",
    "train.rounds=20",
    "run.evaluate_every=5",
]
OFF = ["train.batch_size=10", "train.lr=0.05"]  # gradients that are not clipped diverge at 0.5
NOISES = (0.0, 1.0, 4.0, 2.0)


def dial(runs: Path, data_dir: str) -> None:
    for name, method in METHODS.items():
        run(runs / "audit" / name, LEAK + method, data_dir)
    for name, turned in DIAL.items():
        run(runs / "dial" / name, LEAK + METHODS["cwFedAvg"] + turned, data_dir)


def dp(runs: Path, data_dir: str) -> None:
    run(runs / "dp" / "off", DP + METHODS["cwFedAvg"] + OFF, data_dir)
    for noise in NOISES:
        private = ["privacy.dp=sample", f"privacy.dp_noise={noise}", "privacy.dp_histogram=1"]
        run(runs / "dp" / f"noise {noise:g}", DP + METHODS["cwFedAvg"] + private, data_dir)


def run(folder: Path, settings: list[str], data_dir: str) -> None:
    print(folder, flush=True)
    cwfed.run(configs.load(None, [*BASE, *settings]), folder, resume=True, data_dir=data_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=["dial", "dp"])
    parser.add_argument("--runs", type=Path, default=Path("runs/privacy"))
    parser.add_argument("--data-dir", required=True)
    options = parser.parse_args()
    if "dial" in options.what:
        dial(options.runs, options.data_dir)
    if "dp" in options.what:
        dp(options.runs, options.data_dir)


if __name__ == "__main__":
    main()

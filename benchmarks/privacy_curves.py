"""The curves of docs/privacy.md: what uploads leak against accuracy, and accuracy against epsilon.

    python benchmarks/privacy_curves.py dial --data-dir DATA --runs runs/privacy --docs docs

CIFAR-10, 4,000 samples, 20 clients, the paper's CNN, 25 rounds. Runs that are there are not run again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cwfed
from cwfed import config as configs

BASE = ["data.name=cifar10", "data.samples=4000", "data.clients=20", "model.name=cnn", "train.rounds=25"]
BASE += ["train.lr=0.05", "run.save_models=none"]
SPLITS = {
    "dirichlet": ["data.partition=dirichlet", "data.alpha=0.1"],
    "pathological": ["data.partition=pathological", "data.classes_per_client=2"],
}
METHODS = {
    "FedAvg": ["algorithm.name=fedavg"],
    "cwFedAvg without WDR": ["algorithm.name=cwfedavg", "algorithm.wdr=0"],
    "cwFedAvg": ["algorithm.name=cwfedavg"],
}
DIAL = {f"noise {s:g}": ["privacy.norms=noise", f"privacy.norm_noise={s}"] for s in (0.1, 0.3, 1.0, 3.0)}
DIAL |= {f"{n} levels": ["privacy.norms=coarse", f"privacy.norm_levels={n}"] for n in (3, 2, 1)}


def run(folder: Path, settings: list[str], data_dir: str) -> None:
    print(folder, flush=True)
    cwfed.run(configs.load(None, [*BASE, *settings]), folder, resume=True, data_dir=data_dir)


def dial(runs: Path, data_dir: str) -> None:
    for split, dealt in SPLITS.items():
        for name, method in METHODS.items():
            run(runs / "audit" / split / name, dealt + method, data_dir)
        if split == "dirichlet":
            for name, turned in DIAL.items():
                run(runs / "dial" / name, dealt + METHODS["cwFedAvg"] + turned, data_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["dial"])
    parser.add_argument("--runs", type=Path, default=Path("runs/privacy"))
    parser.add_argument("--data-dir", required=True)
    options = parser.parse_args()
    dial(options.runs, options.data_dir)


if __name__ == "__main__":
    main()

"""What Flower's client-side clipping and noise cost in accuracy: cwFedAvg on the digits, ten clients with two classes each.

    python benchmarks/flower_mods.py

Clipping is `federation.clip` (Flower's fixedclipping_mod), noise is Flower's LocalDpMod; both act on the update against the
personal model that the client received. The epsilon is that of one round. LocalDpMod draws its noise unseeded: numbers move a little.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import cwfed.flower  # first: turns Flower's usage reports off
from cwfed.federation import config as configs
from cwfed.flower import Plan, client_app, server_app
from cwfed.flower.plan import FederationSection
from cwfed.runs.folder import RunFolder

CLIENTS, DELTA = 10, 1e-5
SETTINGS = ["train.rounds=20", "train.lr=0.05", "run.engine=loop", "run.evaluate_every=1", f"data.clients={CLIENTS}"]


def accuracy(clip: float = 0.0, epsilon: float = 0.0) -> tuple[float, float, float]:
    """Test accuracy of the models as received, in the best and in the last round, and after local training in the last."""
    from flwr.clientapp.mod import LocalDpMod
    from flwr.simulation import run_simulation

    with tempfile.TemporaryDirectory() as folder:
        section = FederationSection(
            shape="1x8x8", classes=10, nodes=CLIENTS, clients=CLIENTS, out=f"{folder}/run", keep="never",
            clip=0.0 if epsilon else clip,
        )  # fmt: skip
        plan = Plan(configs.load(None, SETTINGS), section)
        mods = [LocalDpMod(clip, sensitivity=clip, epsilon=epsilon, delta=DELTA)] if epsilon else []
        run_simulation(
            server_app(plan),
            client_app(plan=plan, mods=mods),
            num_supernodes=CLIENTS,
            backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"log_to_driver": False}},
        )
        summary = RunFolder(Path(folder) / "run").summary()
    found = summary["accuracy"]
    return found["received"]["best"], found["received"]["last"], found["trained"]["last"]


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    assert cwfed.flower
    print("| clients send | received, best round, % | received, last round, % | after local training, last, % |")
    print("|---|---:|---:|---:|")
    cases = [("their models", {})]
    cases += [(f"updates clipped to {clip:g}", {"clip": clip}) for clip in (1.0, 0.3)]
    cases += [
        (f"clipped to 0.3, noise for epsilon = {epsilon:,} a round", {"clip": 0.3, "epsilon": float(epsilon)})
        for epsilon in (1000, 100)
    ]
    for label, case in cases:
        numbers = " | ".join(f"{100 * found:.1f}" for found in accuracy(**case))
        print(f"| {label} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()

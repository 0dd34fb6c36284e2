"""Own data: a function that returns (inputs, labels). Images are N x H x W x C, vectors N x F.

The same from the command line, in this folder: cwfed run --set data.name=own_data:three_rings
"""

import numpy as np

import cwfed


def three_rings() -> tuple[np.ndarray, np.ndarray]:
    """Points on three rings; a label can be anything that sorts."""
    rng = np.random.default_rng(0)
    ring = rng.integers(3, size=1500)
    angle = rng.uniform(0, 2 * np.pi, size=1500)
    radius = 1 + ring + rng.normal(scale=0.2, size=1500)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return points, np.array(["inner", "middle", "outer"])[ring]


def main() -> None:
    config = cwfed.load_config(
        settings=["data.name=own_data:three_rings", "data.partition=dirichlet", "data.alpha=0.3", "data.clients=8",
                  "train.rounds=30", "train.lr=0.1"]
    )  # fmt: skip
    summary = cwfed.run(config)
    print(f"{summary.dataset}: {summary.reported.accuracy:.1%}, worst tenth {summary.per_client.worst_decile:.1%}")


if __name__ == "__main__":
    main()

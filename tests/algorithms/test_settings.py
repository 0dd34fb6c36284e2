"""The hyper-parameters of all algorithms: their defaults, and where they end."""

from __future__ import annotations

import pytest

from cwfed.algorithms import FedAvg, build, describe, foreign
from cwfed.core.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        (
            "cwfedavg",
            {"layers": "output", "distribution": "estimated", "wdr": 5.0, "class_cap": 1.0, "robust": "mean"},
        ),
        ("fedprox", {"mu": 0.001}),
        ("fedamp", {"alpha": 1000.0, "lambda": 1.0, "sigma": 0.1}),
        ("fedfomo", {"downloads": 0, "holdout": 0.2, "epsilon": 0.3}),
        ("cfl", {"eps1": 0.4, "eps2": 0.9, "warm_up": 20}),
        ("ifca", {"k": 2}),
        ("fednh", {"rho": 0.9, "scale": 1.0, "learn_scale": True}),
        ("feduv", {"mu": 2.5, "lambda": 0.5}),
        ("fedper", {"personal_layers": "output"}),
        ("fedrep", {"personal_layers": "output", "head_epochs": 1}),
        ("fedala", {"top_layers": 1, "rows": False, "rate": 1.0, "share": 0.8, "still": 0.1}),
        ("lg-fedavg", {"shared_layers": "output"}),
        ("fedbabu", {"personal_layers": "output", "tune_epochs": 5, "tuned": "all"}),
        ("fedbn", {"norms": ["batch"]}),
        ("fedrod", {"gamma": 1.0, "personal_start": "copy"}),
        ("feddbe", {"kappa": 50.0, "mean_momentum": 1.0}),
        ("ditto", {"lambda": 0.1}),
        ("pfedme", {"lambda": 15.0, "steps": 5, "rate": 0.01, "beta": 1.0, "decay": 0.0, "restart": False}),
        ("apfl", {"alpha": 0.5, "adaptive": True}),
        ("per-fedavg", {"tuning_steps": 1}),
        ("fedas", {"align_epochs": 1, "rate": 0.01, "batch_size": 16, "weights": "fisher"}),
        ("fedcac", {"tau": 0.5, "beta": 170.0}),
        ("fedproto", {"lambda": 1.0, "weights": "samples", "predict": "prototypes"}),
        ("fedpac", {"lambda": 1.0, "head_epochs": 1, "head_lr": 1.0}),
        ("fedcp", {"lambda": 5.0}),
        ("gpfl", {"lambda": 0.01, "mu": 0.1}),
    ],
)
def test_defaults_are_the_paper_s_or_the_authors(name, defaults):
    assert describe(build(name), name).items() >= defaults.items()


@pytest.mark.parametrize(
    ("name", "setting", "allowed", "refused"),
    [
        ("cwfedavg", "wdr", 0.0, -1e-9),
        ("cwfedavg", "class_cap", 1e-9, 0.0),
        ("cwfedavg", "class_cap", 1.0, 1.001),
        ("cwfedavg", "trim", 0.0, -1e-9),
        ("cwfedavg", "trim", 0.499, 0.5),
        ("fedprox", "mu", 0.0, -1e-9),
        ("fedamp", "alpha", 1e-9, 0.0),
        ("fedamp", "sigma", 1e-9, 0.0),
        ("fedamp", "lambda", 0.0, -1e-9),
        ("fedfomo", "downloads", 0, -1),
        ("fedfomo", "holdout", 1e-9, 0.0),
        ("fedfomo", "holdout", 0.999, 1.0),
        ("fedfomo", "epsilon", 0.0, -1e-9),
        ("fedfomo", "epsilon", 1.0, 1.001),
        ("cfl", "eps1", 0.0, -1e-9),
        ("cfl", "eps2", 0.0, -1e-9),
        ("cfl", "warm_up", 0, -1),
        ("ifca", "k", 1, 0),
        ("fednh", "rho", 0.0, -1e-9),
        ("fednh", "rho", 1.0, 1.001),
        ("fednh", "scale", 1e-9, 0.0),
        ("feduv", "mu", 0.0, -1e-9),
        ("feduv", "lambda", 0.0, -1e-9),
        ("fedbabu", "tune_epochs", 0, -1),
        ("fedrep", "head_epochs", 0, -1),
        ("ditto", "lambda", 0.0, -1e-9),
        ("fedala", "top_layers", 0, -1),
        ("fedala", "rate", 0.0, -1e-9),
        ("fedala", "share", 1e-9, 0.0),
        ("fedala", "share", 1.0, 1.001),
        ("fedala", "still", 0.0, -1e-9),
        ("fedala", "most_epochs", 1, 0),
        ("fedrod", "gamma", 0.0, -1e-9),
        ("feddbe", "kappa", 0.0, -1e-9),
        ("feddbe", "mean_momentum", 1e-9, 0.0),
        ("feddbe", "mean_momentum", 1.0, 1.001),
        ("pfedme", "lambda", 0.0, -1e-9),
        ("pfedme", "lambda", 199.0, 200.0),
        ("pfedme", "steps", 0, -1),
        ("pfedme", "rate", 1e-9, 0.0),
        ("pfedme", "beta", 0.0, -1e-9),
        ("pfedme", "decay", 0.0, -1e-9),
        ("apfl", "alpha", 0.0, -1e-9),
        ("apfl", "alpha", 1.0, 1.001),
        ("per-fedavg", "alpha", 0.0, -1e-9),
        ("per-fedavg", "tuning_steps", 0, -1),
        ("fedas", "align_epochs", 0, -1),
        ("fedas", "rate", 0.0, -1e-9),
        ("fedas", "batch_size", 1, 0),
        ("fedcac", "tau", 0.0, -1e-9),
        ("fedcac", "tau", 1.0, 1.001),
        ("fedcac", "beta", 1e-9, 0.0),
        ("fedproto", "lambda", 0.0, -1e-9),
        ("fedpac", "lambda", 0.0, -1e-9),
        ("fedpac", "head_epochs", 0, -1),
        ("fedpac", "head_lr", 1e-9, 0.0),
        ("fedcp", "lambda", 0.0, -1e-9),
        ("gpfl", "lambda", 0.0, -1e-9),
        ("gpfl", "mu", 0.0, -1e-9),
    ],
)
def test_settings_end_where_they_say(name, setting, allowed, refused):
    assert describe(build({"name": name, setting: allowed}), name)[setting] == allowed
    with pytest.raises(ConfigError, match=name):
        build({"name": name, setting: refused})


@pytest.mark.parametrize("setting", [("lg-fedavg", "shared_layers"), ("fedrep", "head_epochs"), ("ditto", "lambda")])
def test_true_is_no_number(setting):
    name, key = setting
    with pytest.raises(
        ConfigError, match=f"algorithm.{key} = True is not possible: the setting is not one that is true or false"
    ):
        build({"name": name, key: True})
    assert build({"name": "apfl", "adaptive": False}).adaptive is False


def test_an_algorithm_is_a_name_or_a_table():
    with pytest.raises(ConfigError, match="a name or a table with a name, not 3"):
        build(3)
    assert build({"name": "cwfedavg", "objective": FedAvg()}) == build("cwfedavg")  # or is there already


def test_code_of_others_is_found_at_any_depth():
    inside = {"name": "cwfedavg", "wdr": 1.0, "objective": {"name": "mine:Own", "inner": {"name": "other:Own"}}}
    assert foreign(inside) == ["mine:Own", "other:Own"]
    assert foreign({"name": "fedavg"}) == foreign("mine:Own") == []

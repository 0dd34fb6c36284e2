from __future__ import annotations

import os

import pytest

from cwfed.core.errors import ConfigError
from cwfed.federation import config as configs
from cwfed.federation.config import Config, from_table, load
from tests.conftest import make_endless


def test_an_empty_file_is_the_digits_experiment(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    assert load(path) == Config() == load()
    assert (Config().data.name, Config().algorithm_name) == ("digits", "cwfedavg")


def test_the_defaults_are_the_paper_s():
    config = Config()
    assert (config.data.clients, config.train.rounds, config.train.lr) == (20, 1000, 0.005)
    assert (config.train.batch_size, config.train.epochs, config.train.participation) == (10, 1, 1.0)
    assert config.algorithm["layers"] == "output"


def test_a_written_config_is_complete_and_reads_back_the_same():
    config = load(
        None, ["algorithm.objective=fedprox", "algorithm.layers=['fc', 'output']", "model.options.hidden=3"]
    )
    text = config.to_toml()
    assert "mu = 0.001" in text
    import tomllib

    assert from_table(tomllib.loads(text)) == config


def test_set_understands_toml_values_and_bare_words():
    config = load(
        None, ["train.rounds=7", "data.name=mnist", "data.balanced=true", 'data.path="a b"', "algorithm.layers=2"]
    )
    assert (config.train.rounds, config.data.name, config.data.balanced) == (7, "mnist", True)
    assert (config.data.path, config.algorithm["layers"]) == ("a b", 2)
    assert load(None, ["data.feature_columns=[a, b c]"]).data.feature_columns == ["a", "b c"]


def test_naming_another_algorithm_leaves_the_file_s_hyper_parameters_behind(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[algorithm]\nname = "cwfedavg"\nwdr = 500.0\n')
    assert load(path, ["algorithm.name=fedprox"]).algorithm == {"name": "fedprox", "mu": 0.001}
    assert load(path, ["algorithm.name=cwfedavg"]).algorithm["wdr"] == 500.0
    assert configs.with_settings(load(path), ["algorithm.wdr=1"]).algorithm["wdr"] == 1.0


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("data.nme=digits", "unknown setting data.nme: did you mean name"),
        ("lr=1", "unknown setting lr: did you mean train.lr"),
        ("train.seed=1", "unknown setting train.seed: did you mean run.seed"),
        ("trian.lr=1", "unknown setting trian: did you mean train"),
        ("train=3", "train = 3 is not possible: it must be a section, with settings of its own"),
        ("train.lr=fast", "train.lr = 'fast' is not possible: it must be a number"),
        ("train.lr=nan", "train.lr = nan is not possible: it must be a finite number"),
        ("train.lr=0", "train.lr = 0 is not possible: it must be above 0"),
        ("train.rounds=1.5", "train.rounds = 1.5 is not possible: it must be a whole number"),
        ("train.rounds=-1", "train.rounds = -1 is not possible: it must be at least 1"),
        ("data.balanced=maybe", "data.balanced = 'maybe' is not possible: it must be true or false"),
        ("data.path=[1]", "data.path = [1] is not possible: it must be a text"),
        (
            "data.feature_columns=a,b",
            'data.feature_columns = \'a,b\' is not possible: it must be a list, such as ["a", "b"]',
        ),
        ("train.schedule=stpe", "train.schedule = 'stpe' is not possible: it must be 'constant', 'step' or 'cosine'"),
        ("algorithm.wrd=1", "unknown setting algorithm.wrd for cwfedavg: did you mean wdr"),
        ("algorithm.name=fedavgg", "unknown algorithm 'fedavgg': did you mean fedavg"),
        ("data.name=cifar", "unknown data set 'cifar': did you mean cifar10"),
        ("model.name=resnet", "unknown model 'resnet': did you mean resnet18"),
        ("data.alpha=0", "data.alpha = 0 is not possible"),
        ("data.alpha=nan", "data.alpha = nan is not possible"),
        ("train.participation=0", "train.participation = 0 is not possible"),
        ("train.participation=2.5", "neither a fraction nor a whole number"),
        ("train.lr=-0.1", "train.lr = -0.1 is not possible"),
        ("data.clients=0", "data.clients = 0 is not possible"),
        ("data.partition=random", "unknown partition 'random': known: column, dirichlet"),
        ("run.engine=gpu", "'auto', 'loop', 'threads', 'processes' or 'vmap'"),
        ("train.lr.more=3", "train.lr"),
        ("algorithm=3", "algorithm = 3 is not possible"),
        ("algorithm.objective=3", "an algorithm is a name or a table"),
        ("algorithm.objective.name=3", "must be a text"),
        ("algorithm.name=:x", "must look like"),
        ("algorithm.name=.a:x", "must look like"),
        ("train.rounds=400000000", "it must be at most 10000000"),
        (f"train.rounds={'9' * 26}", "train.rounds is not possible: a whole number has at most 19 digits"),
        (f"run.seed={'9' * 26}", "run.seed is not possible: a whole number"),
        (f"model.options.hidden={'9' * 26}", "model.options.hidden is not possible: a whole number"),
        ("run.workers=1000000", "run.workers = 1000000 is not possible"),
        ("nonsense", "must look like section.key=value"),
        ("=3", "must look like section.key=value"),
    ],
)
def test_bad_settings_are_one_clear_sentence(setting, says):
    with pytest.raises(ConfigError) as error:
        load(None, [setting])
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["[data\n", "data = 3\n", "\xff\xfe"])
def test_bad_files(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError):
        load(path)
    path.write_text("algorithm = 3")
    with pytest.raises(ConfigError):
        load(path, ["algorithm.name=fedavg"])
    with pytest.raises(ConfigError, match=r"nothing\.toml does not exist$"):
        load(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="is a folder: give the file in it"):
        load(tmp_path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is no text in UTF-8"):
        load(path)
    with pytest.raises(ConfigError, match="does not exist: the preset of that name is preset:digits/fedavg"):
        load("digits/fedavg")


@pytest.mark.parametrize("key", [".".join(["a"] * 100_000), '[a."b" . ' + "c.'d'." * 20_000 + "e]\nf"])
def test_a_dotted_key_cannot_take_time_with_the_square_of_its_length(tmp_path, key):
    """200 KB took 25 seconds: it is refused before it is parsed."""
    (tmp_path / "c.toml").write_text(f"{key} = 1\n")
    with pytest.raises(ConfigError, match="more than 16 parts"):
        load(tmp_path / "c.toml")


def test_dots_in_texts_are_no_keys(tmp_path):
    names = [f"layer{i}.0.conv1.weight" for i in range(20)]
    (tmp_path / "c.toml").write_text(f"[data]\npath = '{'../' * 30}x{'.y' * 30}'\n[algorithm]\nlayers = {names}\n")
    assert load(tmp_path / "c.toml").data.path.endswith(".y")


@pytest.mark.parametrize("way", ["pipe", "device", "large"])
def test_a_config_is_a_small_file(tmp_path, way):
    path = tmp_path / "c.toml"
    if way == "large":
        path.write_text("")
        os.truncate(path, 2**40)  # a sparse file takes no room, and would take all memory
    else:
        make_endless(path, way)
    with pytest.raises(ConfigError, match="bytes, more than the" if way == "large" else "a pipe, a device"):
        load(path)


def test_one_setting_need_not_be_a_list():
    assert configs.load(settings="train.rounds=3") == configs.load(settings=["train.rounds=3"])
    with pytest.raises(ConfigError, match=r"is a text, not \['train\.rounds=3'\]: settings="):
        configs.load(["train.rounds=3"])

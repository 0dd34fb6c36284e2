"""Settings of a federation, the project, keys, the command line: what is written, and what bad input gets."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the extra flower is not installed")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from typer.main import get_command

from cwfed import data
from cwfed.cli import app
from cwfed.core.errors import ConfigError, CwfedError, DataError, RunError
from cwfed.core.types import Download, ExtraSpec
from cwfed.federation.experiment import deal
from cwfed.flower import Plan, keys, wire
from cwfed.flower.local import LocalFederation
from cwfed.flower.project import write_project
from cwfed.flower.site import Site, node_worker
from tests import processes
from tests.conftest import small
from tests.flower import page
from tests.flower import test_deployment as deployment
from tests.flower import test_production as production
from tests.flower.helpers import plan_of

TABLE = {"federation.shape": "1x8x8", "federation.classes": 10, "train.rounds": 3, "algorithm.name": "fedprox"}


def cwfed(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "cwfed"
    return processes.run([program, *command], cwd=cwd)


# --- the plan


def test_a_plan_survives_being_written_down():
    plan = plan_of(small('algorithm.layers=["output"]', "algorithm.objective.name=fedprox"), 3)
    again = Plan.of(plan.table())
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert all(isinstance(value, str | int | float | bool) for value in plan.table().values()), "as Flower wants it"


def test_names_of_classes_arrive_as_they_are():
    names = ["cat", "Käse", "\U0001f600", 'a "b"', "[x]", "a\\b", "1", "'", "#", "é"]
    plan = Plan.of(TABLE | {"federation.class_names": json.dumps(names, ensure_ascii=False)})
    assert plan.federation.class_names == names
    assert Plan.of(plan.table()) == plan
    assert Plan.of(TABLE).fingerprint != plan.fingerprint


@pytest.mark.parametrize(
    ("named", "bound"),
    [
        ({}, 2.0),
        ({"algorithm.name": "cwfedavg", "guard.least": 2}, 2.0),
        ({"guard.norm_bound": 0.0}, 0.0),
        ({"guard.norm_bound": 3.5}, 3.5),
        ({"algorithm.name": "ifca"}, 0.0),  # k models, none of which an upload could be compared with
        ({"algorithm.name": "fedfomo"}, 0.0),
        ({"algorithm.name": "local"}, 0.0),
    ],
)
def test_federations_bound_updates_unless_they_are_told_not_to(named, bound):
    plan = Plan.of(TABLE | named)
    assert plan.config.guard.norm_bound == bound
    assert Plan.of(plan.table()) == plan
    plan.blueprint.first_state()


def test_a_new_app_and_a_trial_federation_bound_updates_and_a_simulation_does_not(tmp_path):
    assert small().guard.norm_bound == 0
    for options, bound in (([], 2.0), (["--set", "guard.norm_bound=0"], 0.0)):
        folder = tmp_path / f"app-{bound:g}"
        done = cwfed("flower", "new", str(folder), *options)
        assert done.returncode == 0, done.stderr
        table = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        assert table["guard"]["norm_bound"] == bound
    trial = LocalFederation.prepare(tmp_path / "trial", small(), 2)
    assert trial.plan.config.guard.norm_bound == 2
    assert LocalFederation.open(tmp_path / "trial").plan == trial.plan


def test_a_plan_has_room_for_twice_its_nodes():
    assert Plan.of(TABLE | {"federation.nodes": 3}).clients == 6
    assert Plan.of(TABLE | {"federation.nodes": 3, "federation.clients": 50}).clients == 50


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"federation.shape": "big"}, 'federation.shape = "big" must look like 3x32x32'),
        ({"federation.classes": 1}, "federation.classes = 1 is not possible"),
        ({"federation.class_names": '["a", "b"]'}, r"class_names = .* it must have 10 different names"),
        ({"federation.nods": 1}, "unknown setting federation.nods"),
        ({"train.round": 1}, "unknown setting train.round: did you mean"),
        ({"algorithm.name": "fedavgg"}, "unknown algorithm 'fedavgg'"),
        ({"federation.wait": -1}, "federation.wait = -1 is not possible"),
    ],
)
def test_wrong_settings_get_a_sentence(change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Plan.of(TABLE | change)


def test_a_plan_without_the_shape_of_the_data_says_what_is_missing():
    with pytest.raises(ConfigError, match=r"federation.shape is missing: say what the data .* look like"):
        Plan.of({"federation.classes": 10})


# --- node folders


def test_node_folders_have_what_the_simulator_gives_the_clients(tmp_path):
    federation = deal(small())
    for client, folder in enumerate(data.export(federation, tmp_path)):
        own = data.load(data.SourceSpec("arrays", str(folder)))
        (parts,) = own.fixed_split
        shard = federation.shards[client]
        for mine, theirs in zip(parts, (shard.train, shard.validation, shard.test), strict=True):
            assert np.array_equal(own.inputs[mine], federation.data.inputs[theirs])
            assert np.array_equal(own.labels[mine], federation.data.labels[theirs])


def test_a_damaged_node_folder_is_refused(tmp_path):
    folder = data.export(deal(small()), tmp_path)[0]
    labels = folder / "labels.npy"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DataError, match="do not match their checksum"):
        data.load(data.SourceSpec("arrays", str(folder)))
    np.save(folder / "parts.npy", np.zeros(3))
    with pytest.raises(DataError, match="holds no data set of cwfed, or a damaged one"):
        data.load(data.SourceSpec("arrays", str(folder)))


def test_the_command_exports_node_folders(tmp_path):
    done = cwfed("data", "export", "--set", "data.clients=3", "--out", "nodes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "nodes").iterdir()) == ["client-000", "client-001", "client-002"]
    fewer = cwfed("data", "export", "--set", "data.clients=2", "--out", "nodes", cwd=tmp_path)
    assert (fewer.returncode, fewer.stderr) == (
        1,
        "error: nodes/client-002 is of another split: empty nodes or choose another folder\n",
    )


@pytest.mark.parametrize("method", ["fedavg", "fedfomo"])
def test_a_node_splits_its_data_by_the_split_seed(method):
    def shard(*settings: str) -> list[list[int]]:
        plan = plan_of(small(f"algorithm.name={method}", *settings), 2)
        own = node_worker(plan, Site("here", data.load(data.SourceSpec("digits"))), 0).federation.shards[0]
        return [part.tolist() for part in (own.train, own.validation, own.test, own.holdout)]

    assert shard("data.split_seed=7", "run.seed=1") == shard("data.split_seed=7", "run.seed=2") == shard("run.seed=7")
    assert shard("data.split_seed=7", "run.seed=1") != shard("run.seed=1")


# --- the project


def test_a_project_has_the_plan_and_two_apps(tmp_path):
    plan = plan_of(small(), 2)
    write_project(tmp_path / "My Federation", plan)
    table = tomllib.loads((tmp_path / "My Federation" / "pyproject.toml").read_text())
    assert table["project"]["name"] == "my-federation"
    app = table["tool"]["flwr"]["app"]
    assert app["components"] == {
        "serverapp": "my_federation.server_app:app",
        "clientapp": "my_federation.client_app:app",
    }
    assert app["config"]["federation"]["shape"] == "1x8x8"
    assert app["config"]["train"]["rounds"] == 3


def test_a_project_overwrites_nothing_and_wants_a_name(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(CwfedError, match="is there already"):
        write_project(tmp_path / "taken", plan_of(small(), 2))
    with pytest.raises(CwfedError, match="cannot be the name of a Python package"):
        write_project(tmp_path / "1234", plan_of(small(), 2))


def test_the_command_refuses_with_a_sentence(tmp_path):
    for command, sentence in (
        (["flower", "new", "x", "--shape", "wide"], "must look like 3x32x32"),
        (
            ["flower", "up", "--nodes", "4", "--set", "data.samples=1000000"],
            "data.samples = 1000000, but digits has only",
        ),
        (["run", "--backend", "flowr"], "unknown backend 'flowr': did you mean flower?"),
    ):
        done = cwfed(*command, cwd=tmp_path)
        assert done.returncode == 1
        assert sentence in done.stderr.replace("\n", " ")
        assert "Traceback" not in done.stderr


def test_a_federation_goes_on_only_as_it_was_made(tmp_path):
    """What is asked again and is the same may stay in the command; anything else is refused, not passed over."""
    made = LocalFederation.prepare(tmp_path / "f", small(), 3)
    again = LocalFederation.open(made.folder)
    again.check_same(None, None, None)
    again.check_same(small(), 3, 600.0)
    for asked, says in (
        ((None, 5, None), "--nodes is 3 there and 5 here"),
        ((None, None, 60.0), "--timeout is 600.0 there and 60.0 here"),
        ((small("train.lr=0.5"), None, None), "train.lr is 0.05 there and 0.5 here"),
    ):
        with pytest.raises(RunError, match=says):
            again.check_same(*asked)
    done = cwfed("flower", "up", "--out", "f", "--nodes", "5", cwd=tmp_path)
    assert done.returncode == 1
    assert "--nodes is 3 there and 5 here" in " ".join(done.stderr.split())


# --- keys


def test_keys_are_secret_and_fit_together(tmp_path):
    keys.certificates(tmp_path)
    private = keys.node_key(tmp_path, "client-000")
    for secret in (private, tmp_path / "server.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    key = load_ssh_private_key(private.read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "client-000.pub").read_bytes())
    assert key.public_key() == public
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "localhost" in names.get_values_for_type(x509.DNSName)


# --- the wire

tensors = st.tuples(
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8]),
    st.lists(st.integers(0, 4), max_size=3),
).map(lambda drawn: torch.arange(int(np.prod(drawn[1])), dtype=drawn[0]).reshape(drawn[1]))


@given(st.dictionaries(st.text(min_size=1, max_size=5), tensors, max_size=4))
@settings(max_examples=50, deadline=None)
def test_what_is_sent_arrives(params):
    found = wire.from_record(wire.to_record(params), "it")
    assert found.keys() == params.keys()
    for name, tensor in params.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


@given(st.dictionaries(st.text(min_size=1, max_size=5), tensors, min_size=1, max_size=4), st.integers(1, 1000))
@settings(max_examples=50, deadline=None)
def test_a_message_with_numbers_travels_in_few_pieces_and_arrives_as_it_was(params, piece):
    content = RecordDict({"told": ConfigRecord({"round": 3, "run": "ab"}), "metrics": MetricRecord({"loss": [0.5]})})
    assert wire.wrapped(content) is content, "there is nothing to win"
    wire.upload_to(content, params, {})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wire, "PIECE", piece)
        there = wire.wrapped(content)
    assert all(len(record[""]) <= piece for record in there.values())
    found = wire.unwrapped(there)
    assert found == content
    assert list(found["model"]) == list(content["model"])
    assert wire.unwrapped(found) is found


def test_a_model_travels_in_three_calls():
    content = RecordDict({"told": ConfigRecord({"round": 3})})
    wire.download_to(content, Download(({f"layer {i}": torch.randn(100, 100) for i in range(8)},)))
    calls = [len(get_all_nested_objects(Message(c, 1, "train"))) for c in (content, wire.wrapped(content))]
    assert calls == [20, 3], "Flower sends each of them by itself, three times on the way"


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=3), st.integers(0, 200))
@settings(max_examples=300, deadline=None)
def test_pieces_that_make_no_message_are_refused(noise, cut):
    content = RecordDict({"told": ConfigRecord({"round": 3})})
    wire.download_to(content, Download(({"w": torch.zeros(3)},)))
    honest = wire.wrapped(content)["piece-0"][""]
    pieces = {f"piece-{i}": ConfigRecord({"": data}) for i, data in enumerate([honest[:cut], *noise])}
    with suppress(wire.BadMessage):  # some noise is an empty message
        wire.unwrapped(RecordDict(pieces))


@pytest.mark.parametrize(
    "more",
    [
        {"piece-0": ConfigRecord({"": "text"})},
        {"piece-0": ConfigRecord({"": [b"a", b"b"]})},
        {"piece-0": ConfigRecord()},
        {"piece-0": MetricRecord({"": 1})},
        {"piece-2": ConfigRecord({"": b""})},
        {"told": ConfigRecord()},
    ],
    ids=str,
)
def test_pieces_of_another_kind_are_refused(more):
    content = RecordDict()
    wire.download_to(content, Download(({"w": torch.zeros(3)},)))
    with pytest.raises(wire.BadMessage):
        wire.unwrapped(RecordDict({**wire.wrapped(content), **more}))


def test_downloads_of_any_number_of_models_arrive_in_order():
    models = tuple({"w": torch.full((2,), float(i))} for i in range(12))
    for sent in (Download(models, {"note": torch.tensor(3)}), Download(models[:1]), Download(())):
        content = RecordDict()
        wire.download_to(content, sent)
        found = wire.download_from(content, {"w": ExtraSpec(torch.float32, (2,))})
        assert [float(model["w"][0]) for model in found.models] == [float(model["w"][0]) for model in sent.models]
        assert found.notes.keys() == sent.notes.keys()


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_bytes_do_more_than_be_refused(noise, has_magic):
    """Anything that is not exactly the tensor that is expected is a BadMessage: no other error, no code, no memory."""
    honest = wire.to_record({"w": torch.zeros(3)})["w"]
    sent = honest.data[:10] + noise if has_magic else noise
    array = Array("float32", (3,), "numpy.ndarray", sent)
    with pytest.raises(wire.BadMessage):
        wire.from_record(ArrayRecord({"w": array}), "it", {"w": ExtraSpec(torch.float32, (3,))})


def test_a_header_that_claims_a_mountain_is_refused_before_memory_is_asked_for():
    header = json.dumps({"descr": "<f8", "fortran_order": False, "shape": [10**12]}).replace("false", "False")
    header = header.replace("[", "(").replace("]", ",)")
    body = (b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")) + header.encode()
    with pytest.raises(wire.BadMessage, match="bytes where its header says 8,000,000,000,000"):
        wire.from_record(ArrayRecord({"w": Array("float64", (1,), "numpy.ndarray", body)}), "it")


# --- the page


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's own
def test_every_command_of_the_page_is_carried_out_by_a_test():
    """What is printed to be typed; of a command that is only spoken of, that it exists and has the option."""
    from flwr.cli.app import app as flwr_app

    carried_out = {
        deployment.INSTALL,
        deployment.TRIAL,
        deployment.SIMULATED,
        deployment.ON_RAY,
        *page.lines(page.section("Two lines in your own app")),
        *page.lines(page.section("In production")),  # all of which test_production.py uses up
        production.REPORT,
    }
    assert set(page.lines()) <= carried_out
    named = {command for command in page.spoken() if page.NAME.fullmatch(command)}
    assert set(page.spoken()) - named <= carried_out
    assert len(named) > 5
    trees = {"cwfed": get_command(app), "flwr": get_command(flwr_app)}
    for command in named:
        program, words, option = page.NAME.fullmatch(command).groups()
        at = trees[program]
        for word in words.split():
            at = at.commands[word]
        assert option.strip() in {"", *(name for parameter in at.params for name in parameter.opts)}, command

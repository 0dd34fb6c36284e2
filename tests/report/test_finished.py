"""Which runs a report shows: whole ones only, and it says what was left out."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest

from cwfed import __version__
from cwfed.core.errors import ConfigError, RunError
from cwfed.report import figures, finished, groups, heatmaps, listing, page
from cwfed.runs import session
from tests.conftest import make_endless, small
from tests.test_cli import cwfed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("fedavg", 0), ("fedavg", 1), ("cwfedavg", 0), ("local", 0)):
        session.run(small(f"algorithm.name={name}", f"run.seed={seed}", "train.rounds=2"), folder / f"{name}-{seed}")
    session.run(small("algorithm.wdr=0", "train.rounds=2"), folder / "no-wdr")
    session.run(small("data.partition=iid", "train.rounds=2"), folder / "iid")
    return folder


def copied(whole, tmp_path):
    """A copy without the seals, as an earlier version would have left it: what lies beneath them is checked too."""
    folder = shutil.copytree(whole / "fedavg-0", tmp_path / "broken")
    for name in ("manifest.json", "summary.json"):
        table = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps({k: v for k, v in table.items() if k not in ("sha256", "events_sha256")})
        )
    (folder / "config.toml").write_text((folder / "config.toml").read_text().partition("\n")[2])
    return folder


def left_out(*paths):
    records, gone = finished.collect(paths)
    assert len(gone) == 1
    return records, gone[0].why


def test_runs_are_grouped_by_experiment_and_seeds_belong_together(whole):
    records, gone = finished.collect([whole])
    assert gone == []
    found = groups.group(records)
    assert [len(group.methods) for group in found] == [4, 1]
    assert sorted(method.label for method in found[0].methods) == [
        "cwfedavg (wdr=0)",
        "cwfedavg (wdr=5)",
        "fedavg",
        "local",
    ]
    fedavg = next(method for method in found[0].methods if method.label == "fedavg")
    assert [record.started.seed for record in fedavg.records] == [0, 1]
    both = [record.summary["reported"]["accuracy"] for record in fedavg.records]
    assert fedavg.row["reported"]["mean"] == pytest.approx(np.mean(both))
    assert fedavg.row["reported"]["std"] == pytest.approx(np.std(both, ddof=1))
    assert "digits" in found[1].title
    assert "IID" in found[1].title
    assert found[0].differing()["algorithm.wdr"].count(0.0) == 1
    assert "run.seed" not in found[0].differing()


def test_runs_of_other_rounds_or_learning_rates_are_not_ranked_together(whole, tmp_path):
    session.run(small("train.rounds=3"), tmp_path / "longer")
    session.run(small("train.rounds=2", "train.lr=0.1"), tmp_path / "faster")
    records, _ = finished.collect([whole / "cwfedavg-0", whole / "fedavg-0", tmp_path])
    found = groups.group(records)
    assert sorted(len(group.methods) for group in found) == [1, 1, 2]
    words = "digits, 600 samples, 2 classes per client, 6 clients, mlp; train.rounds={}, train.lr={}"
    expected = {words.format(*pair) for pair in ((2, 0.05), (3, 0.05), (2, 0.1))}
    assert {group.title for group in found} == expected
    page.write(tmp_path / "r.html", "x", found)
    text = (tmp_path / "r.html").read_text()
    assert text.count("<tr class=best>") == 1  # of the two methods that can be ranked
    assert all(title in text for title in expected)
    done = cwfed("report", whole / "cwfedavg-0", tmp_path / "longer", "-o", "r.html", cwd=tmp_path)
    assert "not ranked together" in " ".join(done.stdout.split())


def test_an_unknown_partition_has_its_name_in_reports(whole, tmp_path):
    """As a version that knows one more would have left it; this one's config refuses it, then it is left out by name."""
    record = finished.read_run(whole / "cwfedavg-0")
    data = record.config.data.model_copy(update={"partition": "stripes"})
    other = replace(record, config=record.config.model_copy(update={"data": data}))
    (group,) = groups.group([other])
    assert group.title == "digits, 600 samples, stripes, 6 clients, mlp"
    page.write(tmp_path / "r.html", "x", [group])
    figures.everything(group)
    folder = copied(whole, tmp_path)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace('"pathological"', '"stripes"'))
    assert "unknown partition 'stripes'" in left_out(folder)[1]


def test_curves_over_rounds_bytes_and_seconds_by_hand(whole):
    (record,) = finished.collect([whole / "cwfedavg-0"])[0]
    method = groups.Method("x", [record])
    series = method.series("received", "bytes")
    down_up = [r.down + r.up for r in record.rounds]
    assert series.x == [down_up[0], sum(down_up)]
    assert series.y == [100 * r.received.accuracy for r in record.rounds]
    assert series.std is None
    assert method.series("training loss").y == [r.loss for r in record.rounds]
    assert method.series("trained loss").y == [r.trained.loss for r in record.rounds]
    assert method.series("distance", "seconds").x[-1] == pytest.approx(record.summary["seconds"]["total"], abs=2e-3)


def test_seeds_are_averaged_in_curves(whole):
    records, _ = finished.collect([whole / "fedavg-0", whole / "fedavg-1"])
    series = groups.Method("x", records).series("accuracy")
    ends = [100 * record.rounds[-1].received.accuracy for record in records]
    assert series.y[-1] == pytest.approx(np.mean(ends))
    assert series.std[-1] == pytest.approx(np.std(ends, ddof=1))


def test_a_run_given_twice_counts_once(whole, tmp_path):
    assert len(finished.collect([whole / "fedavg-0", whole / "fedavg-0"])[0]) == 1
    records, why = left_out(whole / "fedavg-0", copied(whole, tmp_path))
    assert len(records) == 1
    assert "the same experiment and seed as" in why


def test_a_run_without_its_config_is_left_out_by_name(whole, tmp_path):
    folder = copied(whole, tmp_path)
    (folder / "config.toml").unlink()
    for paths in ([tmp_path], [folder]):
        records, (gone,) = finished.collect(paths)
        assert (records, gone.path) == ([], folder)
        assert "has no config.toml" in gone.why
    (listed,) = listing.look([tmp_path])
    assert (listed.state, listed.cells()[4]) == ("damaged", "–")  # not "0 rounds": nobody knows


def test_a_later_version_is_named_before_its_settings(whole, tmp_path):
    folder = copied(whole, tmp_path)
    with (folder / "config.toml").open("a") as file:
        file.write("\nof_the_future = 1\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["versions"]["cwfed"] = "9.0.0"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    _, (gone,) = finished.collect([folder])
    assert "was made by cwfed 9.0.0" in gone.why


def test_unfinished_runs_are_left_out_with_the_command_that_goes_on(whole, tmp_path):
    folder = copied(whole, tmp_path)
    (folder / "summary.json").unlink()
    records, why = left_out(whole / "local-0", folder)
    assert len(records) == 1
    assert f"cwfed run --resume --out {folder}" in why


@pytest.mark.parametrize("key", ["accuracy", "reported", "correlation", "seconds", "per_client", "traffic"])
def test_a_changed_number_is_noticed(whole, tmp_path, key):
    folder = copied(whole, tmp_path)
    text = (folder / "summary.json").read_text()
    summary = json.loads(text)
    changed = re.sub(r"\.(\d)", lambda found: f".{(int(found[1]) + 1) % 10}", json.dumps(summary[key]), count=1)
    summary[key] = json.loads(changed) if key != "traffic" else {"down": 1, "up": 1}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert f"its events do not match its summary ({key} differs)" in left_out(folder)[1]


def set_in(table, path, value):
    *keys, last = path.split(".")
    for key in keys:
        table = table[key]
    table[last] = value


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("manifest.json", "versions", None),
        ("manifest.json", "split", {}),
        ("manifest.json", "data", {}),
        ("manifest.json", "model", {}),
        ("manifest.json", "machine", {}),
        ("manifest.json", "split.histogram", [[1, 2], [3]]),
        ("manifest.json", "split.histogram", "x"),
        ("manifest.json", "seed", 7),
        ("manifest.json", "algorithm", "local"),
        ("manifest.json", "experiment", "0123"),
        ("summary.json", "seconds", {}),
        ("summary.json", "seconds.total", float("nan")),
        ("summary.json", "correlation", "x"),
        ("summary.json", "notes", None),
    ],
)
def test_damage_of_any_kind_is_one_sentence(whole, tmp_path, name, path, value):
    folder = copied(whole, tmp_path)
    table = json.loads((folder / name).read_text())
    set_in(table, path, value)
    (folder / name).write_text(json.dumps(table))
    records, why = left_out(whole / "local-0", folder)
    assert len(records) == 1
    assert str(folder) in why
    assert listing.look([folder])[0].state == "damaged"


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        (0, "phase", "eaten"),
        (0, "test_samples", [1]),
        (0, "clients", "six"),
        (0, "evaluated", []),
        (0, "new", 1),
        (1, "received.right", None),
        (1, "received.accuracy", "high"),
        (1, "correlation", float("nan")),
        (2, "received", None),
        (2, "round", 7),
        (2, "portrait", {"clients": []}),
    ],
)
def test_damaged_events_of_any_kind_are_one_sentence(whole, tmp_path, line, path, value):
    folder = copied(whole, tmp_path)
    lines = (folder / "events.jsonl").read_text().splitlines()
    event = json.loads(lines[line])
    set_in(event, path, value)
    lines[line] = json.dumps(event)
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert str(folder) in left_out(folder)[1]
    assert listing.look([folder])[0].state == "damaged"


@pytest.mark.parametrize("junk", [b"", b"\x00\xff\x80", b"[" * 100_000, b"null"])
@pytest.mark.parametrize("name", ["config.toml", "manifest.json", "summary.json", "events.jsonl"])
def test_junk_is_one_sentence(whole, tmp_path, name, junk):
    folder = copied(whole, tmp_path)
    (folder / name).write_bytes(junk)
    records, why = left_out(whole / "local-0", folder)
    assert len(records) == 1
    assert why


def test_a_config_that_names_code_is_read_without_importing_it(whole, tmp_path, monkeypatch):
    """Somebody else's run folder must not run anything when it is only looked at."""
    (tmp_path / "trap.py").write_text("raise SystemExit('the trap was imported')")
    monkeypatch.chdir(tmp_path)
    folder = copied(whole, tmp_path)
    for name in ("config.toml", "manifest.json", "summary.json", "events.jsonl"):
        (folder / name).write_text(re.sub(r'"fedavg"', '"trap:Mine"', (folder / name).read_text()))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"experiment": ""}))
    (record,), nothing = finished.collect([folder])
    assert not nothing
    assert record.config.algorithm_name == "trap:Mine"
    assert listing.look([folder])[0].state == "finished"
    assert "trap" not in sys.modules


def test_damaged_events_are_noticed(whole, tmp_path):
    folder = copied(whole, tmp_path)
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join([*lines[:-1], lines[-1][: len(lines[-1]) // 2], "\n"]))
    assert "line 3, is damaged" in left_out(folder)[1]


def test_files_of_different_runs_are_noticed(whole, tmp_path):
    folder = copied(whole, tmp_path)
    shutil.copy(whole / "cwfedavg-0" / "config.toml", folder / "config.toml")
    assert "mixed up" in left_out(folder)[1]
    shutil.copy(whole / "fedavg-0" / "config.toml", folder / "config.toml")
    shutil.copy(whole / "fedavg-1" / "summary.json", folder / "summary.json")
    assert "do not match its summary (seed differs)" in left_out(folder)[1]


def made_by(folder, version):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["versions"]["cwfed"] = version
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("made", ["0.1.0", "0.1.7"])
def test_runs_of_an_earlier_release_are_shown_with_a_note(whole, tmp_path, made):
    folder = made_by(copied(whole, tmp_path), made)
    (old, new), left = finished.collect([folder, whole / "local-0"])
    assert (left, new.notes) == ([], [])
    assert old.notes == [
        f"made by cwfed {made}, this is {__version__}: where a method was corrected, results differ (CHANGELOG.md)"
    ]
    (group,) = groups.group([old, new])
    assert [method.row["notes"] for method in group.methods] == [old.notes, []]


def test_a_patch_release_gets_no_note(whole, tmp_path):
    folder = made_by(copied(whole, tmp_path), ".".join(map(str, finished.THIS)) + ".99")
    assert finished.read_run(folder).notes == []


@pytest.mark.parametrize("made", ["0.99.0", "1.0.0", "9.0.0"])
def test_runs_of_a_later_release_are_left_out(whole, tmp_path, made):
    assert f"was made by cwfed {made}, this is {__version__}" in left_out(made_by(copied(whole, tmp_path), made))[1]


@pytest.mark.parametrize("made", ["", "1", "0.x", "٠.١", "0." + "9" * 10_000])
def test_a_version_that_is_none_is_one_sentence(whole, tmp_path, made):
    assert "cannot read" in left_out(made_by(copied(whole, tmp_path), made))[1]


def test_runs_of_another_version_are_left_out(whole, tmp_path):
    folder = copied(whole, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["versions"]["cwfed"] = "0.0.9"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "was made by cwfed 0.0.9" in left_out(folder)[1]
    lines = (folder / "events.jsonl").read_text().replace('"event": "round"', '"event": "lap"')
    (folder / "events.jsonl").write_text(lines)
    shutil.copy(whole / "fedavg-0" / "manifest.json", folder / "manifest.json")
    assert "unknown event 'lap'" in left_out(folder)[1]


def test_empty_folders_and_files_are_one_sentence(tmp_path):
    with pytest.raises(RunError, match="is neither a folder nor an archive"):
        finished.collect([tmp_path / "nothing"])
    with pytest.raises(RunError, match="holds no run of cwfed"):
        finished.collect([tmp_path])


# --- clients that can be compared, and names that are right


def run(folder, *settings):
    session.run(small("train.rounds=2", *settings), folder)
    return finished.read_run(folder)


def test_clients_are_compared_on_the_split_that_most_methods_have(tmp_path):
    one, two, three = (
        run(tmp_path / "a", "algorithm.name=fedavg"),
        run(tmp_path / "b", "algorithm.name=fedavg", "run.seed=1"),
        run(tmp_path / "c", "run.seed=1"),
    )
    (group,) = groups.group([one, two, three])
    assert {i: record.started.seed for i, record in group.aligned().items()} == {0: 1, 1: 1}
    (base,) = group.baselines()
    there, here = two.client_accuracies(), three.client_accuracies()
    assert group.gains(base, 1 - base) == {c: 100 * (here[c] - there[c]) for c in there}
    (apart,) = groups.group([one, three])
    assert len(apart.aligned()) == 1
    assert apart.gains(0, 1) == {}


def test_networks_of_different_size_are_different_experiments(tmp_path):
    records = [run(tmp_path / "a"), run(tmp_path / "b", "model.options.hidden=8")]
    assert len(groups.group(records)) == 2


def test_an_algorithm_that_changes_the_head_is_in_the_same_experiment(tmp_path):
    records = [run(tmp_path / "a"), run(tmp_path / "b", "algorithm.name=fednh")]
    assert records[0].started.parameters != records[1].started.parameters
    (group,) = groups.group(records)
    assert len(group.aligned()) == 2


@pytest.mark.parametrize(
    ("settings", "clients"),
    [(["run.evaluate_clients=3"], 3), (["data.newcomers=2"], 4), (["train.participation=2"], 6)],
)
def test_pictures_name_the_right_clients(tmp_path, settings, clients):
    record = run(tmp_path / "a", *settings)
    assert len(record.portrait.clients) == clients
    panels = heatmaps.norms("x", record)
    assert panels[0].row_names == record.started.evaluated
    (mixture,) = heatmaps.mixture("x", record)
    assert mixture.column_names == record.rounds[-1].participants
    assert [panel.title.split("\n")[0] for panel in panels] == ["x:"] * 4
    assert "output-norms" in figures.everything(groups.group([record])[0])


def test_a_last_round_without_anybody_can_be_shown(tmp_path):
    record = run(tmp_path / "a", "train.participation=0.17", "train.client_dropout=0.99")
    assert record.rounds[-1].participants == []
    (group,) = groups.group([record])
    drawn = figures.everything(group)
    assert "mixtures" not in drawn
    assert "distributions" not in drawn
    page.write(tmp_path / "r.html", "x", [group])


def test_dollars_and_long_names_are_no_mathematics(tmp_path):
    record = run(tmp_path / "a")
    name = "a$b_{c$ " + "long " * 20
    group = groups.Group(name, [groups.Method(name, [record])])
    for drawn in figures.everything(group).values():
        drawn.draw_without_rendering()


def test_a_list_sorts_by_settings_of_different_kinds(tmp_path):
    for i, layers in enumerate(("all", 2, "output")):
        run(tmp_path / str(i), f"algorithm.layers={layers}")
    found = listing.select(listing.look([tmp_path]), [], "algorithm.layers")
    assert [run.settings["algorithm.layers"] for run in found] == [2, "all", "output"]


# --- cwfed runs


def test_listing_filters_and_sorts(whole, tmp_path):
    found = listing.look([whole])
    assert len(found) == 6
    only = listing.select(found, ["algorithm.name=fedavg", "run.seed=1"], "folder")
    assert [run.path.name for run in only] == ["fedavg-1"]
    best = listing.select(found, ["state=finished"], "accuracy")
    accuracies = [run.accuracy for run in best]
    assert accuracies == sorted(accuracies, reverse=True)
    assert [run.settings["run.seed"] for run in listing.select(found, [], "run.seed")] == [0] * 5 + [1]
    ours = listing.select(found, ["algorithm.name=cwfedavg"], "folder")
    assert [run.path.name for run in ours] == ["cwfedavg-0", "iid", "no-wdr"]
    assert listing.differing(ours) == [
        "partition=pathological, wdr=5.0",
        "partition=iid, wdr=5.0",
        "partition=pathological, wdr=0.0",
    ]
    others = listing.select(found, ["data.partition=pathological"], "folder")
    assert listing.differing(others)[1] == ""  # FedAvg's namesakes are the same but for the seed
    with pytest.raises(ConfigError, match=r"did you mean algorithm\.name"):
        listing.select(found, ["algorithm.nam=x"], "folder")
    with pytest.raises(ConfigError, match="must look like"):
        listing.select(found, ["x"], "folder")
    with pytest.raises(ConfigError, match="did you mean accuracy"):
        listing.select(found, [], "acuracy")


def test_listing_shows_unfinished_and_damaged_runs(whole, tmp_path):
    folder = copied(whole, tmp_path)
    (folder / "summary.json").unlink()
    (unfinished,) = listing.look([folder])
    assert (unfinished.state, unfinished.rounds, unfinished.accuracy) == ("unfinished", 2, None)
    (folder / "summary.json").write_text("{")
    (damaged,) = listing.look([folder])
    assert damaged.state == "damaged"
    assert "summary.json is damaged" in damaged.why


def test_the_commands(whole, tmp_path):
    broken = copied(whole, tmp_path)
    (broken / "summary.json").unlink()
    done = cwfed("report", whole, broken, "-o", "r.html", cwd=tmp_path)
    assert "6 runs, 2 experiments" in done.stdout
    assert "left out:" in done.stderr
    text = (tmp_path / "r.html").read_text()
    assert "not finished" in text
    assert 'src="http' not in text

    done = cwfed("figures", whole / "fedavg-0", whole / "cwfedavg-0", "-o", "f", "--formats", "svg", cwd=tmp_path)
    assert "accuracy-rounds" in done.stdout
    assert {path.suffix for path in (tmp_path / "f").iterdir()} == {".svg", ".tex", ".md", ".csv"}
    assert (tmp_path / "f" / "table.csv").read_text().startswith("label,algorithm,reported_phase,received_best,")
    assert r"\begin{tabular}{lrrrrrrrrrrrr}" in (tmp_path / "f" / "table.tex").read_text()
    assert {"mixtures.svg", "output-norms.svg", "distributions.svg"} <= {
        path.name for path in (tmp_path / "f").iterdir()
    }

    listed = json.loads(cwfed("runs", whole, "--where", "algorithm.wdr=0", "--json", cwd=tmp_path).stdout)
    assert [run["settings"]["algorithm.wdr"] for run in listed] == [0.0]
    shown = cwfed("runs", whole, broken, "--differ", cwd=tmp_path, env={"COLUMNS": "250"}).stdout
    assert "unfinished" in shown

    assert "nothing to report" in cwfed("report", broken, cwd=tmp_path, code=1).stderr
    assert "unknown picture format 'gif'" in cwfed("figures", whole, "--formats", "gif", cwd=tmp_path, code=1).stderr
    assert "is neither a folder nor an archive" in cwfed("runs", cwd=tmp_path, code=1).stderr
    assert "no run has these settings" in cwfed("runs", whole, "--where", "run.seed=7", cwd=tmp_path, code=1).stderr


@pytest.mark.parametrize("rounds", ["400000000", "9" * 26])
def test_rounds_of_a_foreign_config_are_no_length_of_a_list(whole, tmp_path, rounds):
    """400 million took 15.9 GB, 26 nines were an OverflowError."""
    folder = copied(whole, tmp_path)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("rounds = 2\n", f"rounds = {rounds}\n"))
    (found,) = listing.look([folder])
    assert found.state == "damaged"
    assert "train.rounds" in found.why
    summary = json.loads((folder / "summary.json").read_text()) | {"rounds": int(rounds)}
    (folder / "config.toml").write_text(text)
    (folder / "summary.json").write_text(json.dumps(summary))
    assert listing.look([folder])[0].state == "damaged"


@pytest.mark.parametrize("way", ["pipe", "device"])
@pytest.mark.parametrize("name", ["config.toml", "manifest.json", "summary.json", "events.jsonl"])
def test_a_pipe_or_a_device_in_a_run_folder_is_one_sentence(whole, tmp_path, name, way):
    folder = copied(whole, tmp_path)
    (folder / name).unlink()
    make_endless(folder / name, way)
    assert "a pipe, a device or a socket" in listing.look([folder])[0].why
    assert "a pipe, a device or a socket" in left_out(folder)[1]


def test_a_foreign_run_folder_cannot_paint_the_terminal(whole, tmp_path):
    """Neither its folder's name nor what its files say: no escape sequence and no forged line."""
    folder = copied(whole, tmp_path).rename(tmp_path / "x\x1b[31mred\n[green]good")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["versions"]["cwfed"] = "\x1b]0;title\x07" + "9" * 100_000
    (folder / "manifest.json").write_text(json.dumps(manifest))
    listed = cwfed("runs", tmp_path, cwd=tmp_path)
    for text in (listed.stdout, listed.stderr, left_out(folder)[1]):
        assert not set(text) & {"\x1b", "\x07"}
        assert len(text) < 20_000
    assert "was made by cwfed �]0;title�999" in listed.stdout

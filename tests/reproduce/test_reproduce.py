"""The real command at scale smoke: every table and figure, in the suite."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from cwfed.cli.reproduce import reproduce
from cwfed.core.errors import ConfigError, RunError
from cwfed.federation.config import load
from cwfed.report.finished import read_run
from cwfed.reproduce import Workshop, find, items, judge, runner
from cwfed.reproduce.both_phases import phases
from cwfed.reproduce.paper_tables import models_sent
from cwfed.runs import archive, session
from cwfed.runs.folder import RunFolder
from tests.test_cli import cwfed

OF_THE_PAPER = [item.name for item in items().values() if not item.beyond]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    done = cwfed("reproduce", "all", "--scale", "smoke", "--out", "r", "--json", cwd=folder)
    return folder, json.loads(done.stdout)


def test_every_table_and_figure_is_made(everything):
    folder, outcomes = everything
    assert [outcome["name"] for outcome in outcomes] == OF_THE_PAPER
    results = folder / "r" / "smoke" / "results"
    for outcome in outcomes:
        name = outcome["name"]
        assert json.loads((results / f"{name}.json").read_text()) == outcome
        assert outcome["rows"] or outcome["pictures"]
        for picture in outcome["pictures"]:
            assert (results / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
            assert (results / f"{picture}.pdf").read_bytes().startswith(b"%PDF")
        if outcome["rows"]:
            lines = list(csv.DictReader((results / f"{name}.csv").read_text().splitlines()))
            assert len(lines) == sum(len(row["cells"]) for row in outcome["rows"])
            assert r"\toprule" in (results / f"{name}.tex").read_text()
    origins = json.loads((results / "runs.json").read_text())
    assert set(origins) == {run for outcome in outcomes for run in outcome["runs"]}
    assert all((folder / "r" / "smoke" / run / "summary.json").exists() for run in origins)
    assert all(set(origin["digests"]) == {"data", "split"} for origin in origins.values())
    overview = (results / "README.md").read_text()
    assert all(items()[name].title in overview for name in OF_THE_PAPER)


def test_pages_say_what_was_run(everything):
    """Smoke runs on digits: no heading, column or claim may say that it was anything else."""
    folder, outcomes = everything
    results = folder / "r" / "smoke" / "results"
    for outcome in outcomes:
        item = find(outcome["name"])
        if not item.settings or item.kind == "hyperparameters":  # computed or drawn, the same at every scale
            continue
        assert outcome["title"].endswith("; run on digits (mlp), not on the paper's data")
        named = [*outcome["columns"], *(claim["says"] for claim in outcome["claims"])]
        assert all("digits (mlp)" in words for words in named if "CIFAR" in words or "ImageNet" in words)
        texts = {ending: results / f"{item.name}.{ending}" for ending in ("md", "json", "csv", "tex")}
        for ending, path in texts.items():
            if path.exists() and ending != "csv":
                assert "run on digits (mlp), not on the paper's data" in path.read_text(), path
            if path.exists() and item.kind == "accuracy":
                assert "digits (mlp) in place of" in path.read_text(), path
    args = ("reproduce", "ablation", "--scale", "smoke", "--no-run", "--out", "r")
    shown = cwfed(*args, cwd=folder, env={"COLUMNS": "200"}).stdout
    assert "digits (mlp) in place of CIFAR-100" in shown
    assert "digits (mlp) in place of Tiny ImageNet" in shown


def test_pages_say_what_is_held_out_and_what_seeds_are(everything):
    folder, outcomes = everything
    main = " ".join(outcomes[0]["notes"])
    assert "nothing is held out for validation, so no round can be picked on it" in main
    assert "fedfomo holds out another 20 % for its own use" in main
    assert "One seed" in main
    assert "data.name = digits (cifar100)" in main
    assert f"- {outcomes[0]['notes'][0]}" in (folder / "r" / "smoke" / "results" / "main-comparison.md").read_text()


def test_published_numbers_stand_beside_ours(everything):
    _, outcomes = everything
    main = outcomes[0]
    assert [row["label"] for row in main["rows"]][-1] == "cwFedAvg (Output)"
    cell = main["rows"][-1]["cells"][0]
    assert cell["published"] == pytest.approx({"mean": 91.23, "std": 0.04, "seeds": 3, "error": 0.04 / 3**0.5})
    assert 0 < cell["ours"]["mean"] < 100
    assert {claim["verdict"] for claim in main["claims"]} == {"undecided"}  # two rounds on digits say nothing


def test_exact_tables_are_judged_at_every_scale(everything):
    _, outcomes = everything
    by_name = {outcome["name"]: outcome for outcome in outcomes}
    memory = by_name["memory"]
    assert memory["columns"] == ["10 classes", "100 classes", "1,000 classes"]
    numbers = {row["label"]: [cell["ours"]["mean"] for cell in row["cells"]] for row in memory["rows"]}
    assert [round(v, 2) for v in numbers["fedavg"]] == [11.18, 11.23, 11.69]
    assert [round(v, 2) for v in numbers["cwfedavg (output), as published"]] == [11.23, 16.36, 524.69]
    assert all(cell["verdict"] == "same" for row in memory["rows"][:3] for cell in row["cells"])
    assert numbers["cwfedavg (all), lean"][2] < numbers["cwfedavg (all), as published"][2] / 40
    assert by_name["hyperparameters"]["claims"][0]["holds"] is True


def test_communication_is_counted_from_the_bytes(everything):
    folder, outcomes = everything
    table = outcomes[1]
    sent = {row["label"]: row["cells"][-1] for row in table["rows"]}
    assert sent["FedAvg"]["ours"]["mean"] == pytest.approx(2, abs=1e-9)
    assert sent["cwFedAvg (Output)"]["ours"]["mean"] == pytest.approx(2, abs=1e-9)
    assert sent["IFCA"]["ours"]["mean"] == pytest.approx(9, rel=1e-3)  # eight models down, one up, and its choice
    assert sent["FedFomo"]["published"]["mean"] == 11  # one up, and those of ten clients down
    runs = folder / "r" / "smoke" / "cifar100-50-clients"
    assert models_sent(read_run(next(runs.glob("ifca*")) / "seed-0")) == sent["IFCA"]["ours"]["mean"]


def test_finished_runs_are_reused_and_only_judged(everything):
    folder, outcomes = everything
    written = {path: path.stat().st_mtime_ns for path in (folder / "r").rglob("summary.json")}
    done = cwfed("reproduce", "ablation", "--scale", "smoke", "--out", "r", "--no-run", "--json", cwd=folder)
    (again,) = json.loads(done.stdout)
    assert again == next(outcome for outcome in outcomes if outcome["name"] == "ablation")
    assert written == {path: path.stat().st_mtime_ns for path in (folder / "r").rglob("summary.json")}


def test_same_runs_give_the_same_bytes(everything):
    folder, _ = everything
    workshop = Workshop("smoke", folder / "r")
    first, second = (judge(find("heatmaps-cifar10-pathological"), workshop) for _ in range(2))
    first.write(folder / "one", ["png", "pdf", "svg"])
    second.write(folder / "two", ["png", "pdf", "svg"])
    for path in (folder / "one").iterdir():
        assert path.read_bytes() == (folder / "two" / path.name).read_bytes()


def test_results_can_be_moved(everything):
    folder, outcomes = everything
    shutil.copytree(folder / "r", folder / "moved")
    args = ("reproduce", "ablation", "--scale", "smoke", "--no-run", "--json", "--out", str(folder / "moved"))
    (again,) = json.loads(cwfed(*args, cwd=folder).stdout)
    assert again == next(outcome for outcome in outcomes if outcome["name"] == "ablation")
    origins = json.loads((folder / "moved" / "smoke" / "results" / "runs.json").read_text())
    assert not any("unreadable" in origin for origin in origins.values())


def test_finished_runs_may_be_archives(everything, tmp_path):
    """They are judged as their folders are, and not run again; a table can be published with the runs it is made of."""
    folder, outcomes = everything
    whole, packed = folder / "r" / "smoke", tmp_path / "smoke"
    for events in whole.glob("ag-news/*/seed-0/events.jsonl"):
        run = events.parent
        archive.write(run, packed / run.parent.relative_to(whole) / "seed-0.cwfed")
    args = ("reproduce", "ag-news", "--scale", "smoke", "--json", "--out", str(tmp_path))
    (again,) = json.loads(cwfed(*args, cwd=folder).stdout)  # would run what is missing
    before = next(outcome for outcome in outcomes if outcome["name"] == "ag-news")
    assert again | {"runs": []} == before | {"runs": []}
    assert again["runs"] == [f"{run}.cwfed" for run in before["runs"]]
    assert not list(packed.rglob("events.jsonl"))
    origins = json.loads((packed / "results" / "runs.json").read_text())
    assert not any("unreadable" in origin for origin in origins.values())

    refused = cwfed(*args, "--set", "train.lr=0.01", cwd=folder, code=1).stderr
    assert "seed-0.cwfed holds another experiment: train.lr" in refused
    longer = Workshop("smoke", tmp_path, changes=["train.rounds=3"])  # without checkpoints nothing can be added
    assert {job.state for job in longer.jobs(find("ag-news"))} == {"new"}
    (job, *_) = longer.jobs(find("ag-news"))
    session.run(job.config, job.folder)  # longer, and beside the archive, which stays what the shorter table is of
    assert job.state == "finished"
    assert job.place == job.folder
    (again,) = json.loads(cwfed(*args, "--no-run", cwd=folder).stdout)
    assert again | {"runs": []} == before | {"runs": []}


def test_a_run_that_patience_ended_is_finished(tmp_path):
    item = find("ag-news").part([], ["FedAvg"])
    changes = ["train.rounds=12", "run.patience=1", "data.validation=0.2", "train.lr=1e-6"]
    workshop = Workshop("smoke", tmp_path, changes=changes)
    workshop.carry_out(item, lambda job: lambda event: None)
    (job,) = workshop.jobs(item)
    assert 0 < RunFolder(job.folder).rounds_done() < 12
    assert job.state == "finished"
    assert judge(item, workshop).rows


def test_a_damaged_run_is_named_with_what_to_do(everything, tmp_path):
    folder, _ = everything
    shutil.copytree(folder / "r" / "smoke" / "ag-news", tmp_path / "smoke" / "ag-news")
    events = tmp_path / "smoke" / "ag-news" / "fedavg" / "seed-0" / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(RunError, match=r"fedavg/seed-0 is damaged.*; remove that, the same command runs it again"):
        judge(find("ag-news"), Workshop("smoke", tmp_path))


def test_a_terminal_says_which_number_is_whose(everything):
    folder, _ = everything
    args = ("reproduce", "selective-layers", "hyperparameters", "--scale", "smoke", "--no-run", "--out", "r")
    shown = cwfed(*args, cwd=folder, env={"COLUMNS": "100"}).stdout
    assert "Ours above, the paper's below." in shown
    assert "90.98 ± 0.15" in shown  # the paper's, with its spread
    assert "…" not in shown  # names are folded, not cut
    k = [line for line in shown.splitlines() if "ifca: k" in line]
    assert [line.count("=") for line in k] == [1, 1, 0]  # the paper names none for MNIST and AG News


def test_seeds_give_a_spread(everything):
    folder, _ = everything
    args = ("reproduce", "ag-news", "--scale", "smoke", "--out", "r", "--seeds", "0,1", "--json")
    (outcome,) = json.loads(cwfed(*args, cwd=folder).stdout)
    assert all(row["cells"][0]["ours"]["std"] is not None for row in outcome["rows"])
    assert all(row["cells"][0]["ours"]["seeds"] == 2 for row in outcome["rows"])
    assert any("over 2 seeds, each with a split of its own" in note for note in outcome["notes"])


def test_dry_run_says_what_would_run(everything, tmp_path):
    folder, _ = everything
    args = ("reproduce", "ag-news", "--scale", "smoke", "--dry-run", "--json")
    new = json.loads(cwfed(*args, "--out", str(tmp_path / "new"), cwd=folder).stdout)
    assert [run["state"] for run in new] == ["new"] * 4
    assert all(run["seconds"] > 0 and run["traffic"] > 0 and run["memory"] > 10**8 for run in new)
    assert not (tmp_path / "new").exists()
    old = json.loads(cwfed(*args, "--out", "r", cwd=folder).stdout)
    assert {run["state"] for run in old} == {"finished"}
    assert sum(run["seconds"] for run in old) == 0


def test_an_estimate_takes_all_data_where_few_cannot_be_dealt_out(tmp_path):
    config = load(None, ["model.name=mlp"])
    assert runner._short_round(config, 20, tmp_path / "run", None, lambda event: None) == 1.0


def test_a_figure_without_its_runs_says_the_command(tmp_path):
    with pytest.raises(RunError, match="cwfed reproduce convergence --scale smoke --out r makes them"):
        judge(find("convergence"), Workshop("smoke", Path("r")))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"names": ["ablatoin"]}, "unknown table or figure 'ablatoin': did you mean ablation"),
        ({"names": ["heatmap"]}, "did you mean heatmaps-cifar10-pathological or heatmaps-cifar10-practical or heat"),
        ({"scale": "tiny"}, "--scale 'tiny' must be one of smoke, small, whole, paper"),
        ({"formats": "png,gif"}, "unknown picture format 'gif'"),
        ({"seeds": "x"}, "must be whole numbers"),
    ],
)
def test_bad_input_is_one_sentence(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        reproduce(**{"names": ["ablation"], "scale": "smoke"} | args)
    assert list(tmp_path.iterdir()) == []


def test_all_is_the_paper_s_and_others_are_named_beside_it(everything):
    folder, _ = everything
    args = ("--scale", "smoke", "--no-run", "--out", "r", "--json", "--formats", "png")
    found = json.loads(cwfed("reproduce", "beyond", "all", "beyond", *args, cwd=folder).stdout)
    assert [outcome["name"] for outcome in found] == ["beyond", *OF_THE_PAPER]


def test_list_names_them_all(tmp_path):
    found = json.loads(cwfed("reproduce", "list", "--json", cwd=tmp_path).stdout)
    assert [item["name"] for item in found] == list(items())


def test_what_is_beyond_the_paper_is_judged_from_the_runs_that_are_there(everything):
    """Runs are the paper's tables', where they are the same; a row without published numbers has none beside it."""
    folder, _ = everything
    args = ("reproduce", "beyond", "--scale", "smoke", "--out", "r", "--settings", "cifar10,cifar100", "--json")
    some = ("--methods", "cwFedAvg (Output),FedAvg,FedALA")
    before = set((folder / "r").rglob("summary.json"))
    cwfed(*args, *some, "--settings", "cifar100", "--formats", "png", cwd=folder)
    assert {path.parts[-3] for path in set((folder / "r").rglob("summary.json")) - before} == {"fedala"}
    (found,) = json.loads(cwfed(*args, "--methods", "cwFedAvg (Output),FedAvg,FedALA", "--no-run", cwd=folder).stdout)
    assert [column.rpartition(", ")[2] for column in found["columns"]] == ["received", "trained"] * 2
    rows = {row["label"]: row["cells"] for row in found["rows"]}
    assert [cell["published"] and cell["published"]["mean"] for cell in rows["FedAvg"]] == [61.94, None, 32.44, None]
    assert [cell["ours"] is None for cell in rows["FedALA"]] == [True, True, False, False]
    assert all(cell["published"] is None for cell in rows["FedALA"])
    (note,) = [note for note in found["notes"] if note.startswith("Not run")]
    assert note.endswith("CIFAR-10, Dirichlet 0.1: FedALA.")
    assert found["pictures"] == ["beyond"]
    of_fedala = [run for run in found["runs"] if "fedala" in run]
    assert len(found["runs"]) == 5
    assert of_fedala == ["cifar100/fedala/seed-0"]
    with pytest.raises(RunError, match="beyond needs 64 runs that are not finished"):
        judge(find("beyond"), Workshop("smoke", folder / "nothing"))


def test_settings_of_ones_own_hold_for_pictures_that_need_no_run(tmp_path):
    outcome = judge(find("data-cifar10"), Workshop("smoke", tmp_path, changes=["data.alpha=7"]))
    assert set(outcome.columns) == {"alpha = 7"}


def test_where_no_method_has_all_its_seeds_there_is_a_table_and_no_picture(tmp_path):
    item = find("beyond").part(["cifar10"], ["FedALA"])
    outcome = phases(item, Workshop("smoke", tmp_path))
    assert outcome.rows == []
    assert outcome.notes[-1].endswith("CIFAR-10, Dirichlet 0.1: FedALA.")
    assert outcome.pictures == {}


def test_settings_of_ones_own_are_said_and_kept_apart(everything, tmp_path):
    folder, _ = everything
    args = ("reproduce", "ag-news", "--scale", "smoke", "--methods", "FedAvg", "--set", "train.lr=0.03")
    (found,) = json.loads(cwfed(*args, "--out", str(tmp_path), "--json", cwd=folder).stdout)
    assert any("train.lr = 0.03 (0.005)" in note for note in found["notes"])
    assert "--set train.lr=0.03" in (tmp_path / "smoke" / "results" / "ag-news.md").read_text()
    refused = cwfed(*args, "--out", "r", "--no-run", cwd=folder, code=1).stderr
    assert "train.lr" in refused
    with pytest.raises(ConfigError, match=r"--set algorithm.wdr=1: methods and seeds are those of the table"):
        Workshop("smoke", tmp_path, changes=["algorithm.wdr=1"])
    with pytest.raises(ConfigError, match=r"--set run.seed=1: methods and seeds"):
        Workshop("smoke", tmp_path, changes=["run.seed=1"])

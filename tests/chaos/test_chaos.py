"""Nothing that was complete is lost: a few of each kind here, hundreds in the soak.

The soak: `CWFED_SOAK_SECONDS=600 python -m pytest -m slow -s tests/chaos`; `CWFED_SOAK_SEED` is another order of events.
"""

from __future__ import annotations

import json
import os
import time

import pytest

from tests.chaos.world import Chaos


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    for parent in (folder, *list(folder.parents)[:2]):
        parent.chmod(0o755)  # a process with fewer rights must get there
    with Chaos(folder) as chaos:
        yield chaos


def test_a_killed_run_goes_on_to_the_same_bits(chaos):
    assert chaos.kill() == "resumed"


@pytest.mark.parametrize("how", ["flip", "zeros"])
def test_the_checkpoint_before_serves_when_the_last_is_damaged(chaos, how):
    assert chaos.damage_unfinished("last checkpoint", how) == "resumed"


@pytest.mark.parametrize("name", ["events.jsonl", "config.toml"])
def test_damaged_files_of_an_unfinished_run_are_noticed(chaos, name):
    assert chaos.damage_unfinished(name, "flip") in ("resumed", "refused")


def test_damaged_files_of_a_finished_run_are_noticed(chaos):
    for name in ("summary.json", "manifest.json", "models/index.json", "models/client-00000.safetensors"):
        chaos.damage_finished(name, "flip")


def test_a_damaged_cache_is_made_again(chaos):
    assert chaos.damage_cache("meta.json", "flip") == "resumed"


def test_a_full_disk_is_one_sentence_and_later_the_run_goes_on(chaos):
    assert chaos.fill_disk(0.5) == "resumed"
    assert chaos.counts["disks filled"] == 1


@pytest.mark.parametrize("name", ["checkpoints", "."])
def test_missing_rights_are_one_sentence_and_later_the_run_goes_on(chaos, name):
    assert chaos.take_rights(name, 0o000 if name == "checkpoints" else 0o555) == "resumed"


def test_of_two_processes_on_one_folder_one_is_refused(chaos):
    assert chaos.two_at_once() == "resumed"


@pytest.mark.slow
def test_soak(tmp_path):
    """For some minutes, whatever comes; prints what was done."""
    for parent in (tmp_path, *list(tmp_path.parents)[:2]):
        parent.chmod(0o755)
    seed = int(os.environ.get("CWFED_SOAK_SEED", "0"))
    end = time.monotonic() + float(os.environ.get("CWFED_SOAK_SECONDS", "180"))
    with Chaos(tmp_path, seed) as chaos:
        kinds = chaos.kinds()
        while time.monotonic() < end:
            chaos.random.choice(kinds)()
    assert chaos.counts["resumed"] > 0
    print(json.dumps(dict(sorted(chaos.counts.items())), indent=1))

"""Archives of runs: small, whole, the same bytes for the same run; a hostile one is a sentence and touches nothing."""

from __future__ import annotations

import json
import shutil
import stat
import struct
import zipfile
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cwfed.cli import share
from cwfed.core import files
from cwfed.core.errors import CwfedError, RunError
from cwfed.report import finished, listing
from cwfed.runs import archive, session
from tests.conftest import small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "mine"
    session.run(small("data.samples=400", "train.rounds=2"), folder)
    return folder


@pytest.fixture
def packed(run, tmp_path):
    archive.write(run, tmp_path / "mine.cwfed")
    return tmp_path / "mine.cwfed"


def rewrite(path, change):
    """The archive with its files changed by a function of {name: content}; and sealed anew."""
    with zipfile.ZipFile(path) as old:
        contents = {name: old.read(name) for name in old.namelist()}
    contents = change(contents)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in contents.items():
            new.writestr(archive._entry(name) if isinstance(name, str) else name, content)


def test_an_archive_has_what_a_report_needs_and_no_more(run, packed, tmp_path):
    with zipfile.ZipFile(packed) as found:
        assert sorted(found.namelist()) == sorted(
            ["config.toml", "manifest.json", "events.jsonl", "summary.json", "seals.json"]
        )
    assert packed.stat().st_size < 50_000
    theirs, ours = finished.read_run(packed), finished.read_run(run)
    assert theirs.summary == ours.summary
    assert theirs.path == packed
    assert theirs.sealed
    archive.write(run, tmp_path / "again.cwfed")
    assert (tmp_path / "again.cwfed").read_bytes() == packed.read_bytes()


def test_report_and_list_read_archives_directly(packed, tmp_path):
    records, left_out = finished.collect([tmp_path])
    assert [record.path for record in records] == [packed]
    assert left_out == []
    (listed,) = listing.look([packed])
    assert listed.state == "finished"
    assert listed.bytes == packed.stat().st_size


def test_the_command_exports_a_run_or_all_below_a_folder(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    share.export(run)
    assert (tmp_path / "mine.cwfed").exists()
    shutil.copytree(run, tmp_path / "all" / "fedavg" / "seed-0")
    shutil.copytree(run, tmp_path / "all" / "local" / "seed-0")
    shutil.copytree(run, tmp_path / "all" / "ditto" / "seed-0")
    (tmp_path / "all" / "ditto" / "seed-0" / "summary.json").unlink()
    share.export(tmp_path / "all", tmp_path / "shared")
    found = [str(path.relative_to(tmp_path / "shared")) for path in (tmp_path / "shared").rglob("*.cwfed")]
    assert sorted(found) == ["fedavg/seed-0.cwfed", "local/seed-0.cwfed"]
    assert "ditto/seed-0 is not finished" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(RunError, match="has no finished run"):
        share.export(tmp_path / "all" / "ditto", tmp_path / "shared")
    for wrong, says in (
        (tmp_path / "x.zip", "ends with .cwfed"),
        (run / "config.toml" / "x.cwfed", "cannot be written"),
    ):
        with pytest.raises(CwfedError, match=says):
            share.export(run, wrong)
    share.export(run, tmp_path / "board")
    assert (tmp_path / "board" / "mine.cwfed").exists()
    with pytest.raises(RunError, match="an archive already"):
        share.export(tmp_path / "mine.cwfed")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="holds no run"):
        share.export(tmp_path / "empty")


def test_only_whole_finished_runs_are_exported(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "copy")
    events = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(events.replace(b'"loss": 2', b'"loss": 3', 1))
    with pytest.raises(RunError, match="damaged"):
        archive.write(folder, tmp_path / "x.cwfed")
    (folder / "events.jsonl").write_bytes(events)
    (folder / "summary.json").unlink()
    with pytest.raises(RunError, match="not finished"):
        archive.write(folder, tmp_path / "x.cwfed")
    assert not (tmp_path / "x.cwfed").exists()


def test_a_changed_file_does_not_match_its_seal(packed):
    rewrite(packed, lambda c: c | {"events.jsonl": c["events.jsonl"].replace(b'"round": 1,', b'"round": 7,', 1)})
    with pytest.raises(RunError, match=r"events\.jsonl does not match its checksum"):
        finished.read_run(packed)


def test_seals_made_anew_do_not_help_where_the_numbers_do_not_follow_from_the_events(packed):
    """Whoever changes the summary and seals everything again is found by the events: the summary is computed anew."""

    def lie(contents):
        summary = json.loads(contents["summary.json"])
        del summary["sha256"]
        summary["reported"]["accuracy"] = 0.99
        text = json.dumps(files.seal_table(summary)).encode()
        contents["summary.json"] = text
        names = [name for name in contents if name != "seals.json"]
        seals = files.seal_table({name: files.sha256(contents[name]) for name in names})
        return contents | {"seals.json": json.dumps(seals).encode()}

    rewrite(packed, lie)
    with pytest.raises(RunError, match=r"mine\.cwfed is damaged: its events do not match its summary"):
        finished.read_run(packed)


def link(name):
    entry = archive._entry(name)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


HOSTILE = {
    "a path that leads out": lambda c: c | {"../../evil": b"x"},
    "an absolute path": lambda c: c | {"/tmp/evil": b"x"},
    "a file too many": lambda c: c | {"model.pkl": b"x"},
    "a file too few": lambda c: {name: content for name, content in c.items() if name != "manifest.json"},
    "a link": lambda c: {n: v for n, v in c.items() if n != "config.toml"} | {link("config.toml"): b"/etc/passwd"},
    "a config beyond all bounds": lambda c: c | {"config.toml": b"#" * (2**20 + 1)},
    "seals that are no table": lambda c: c | {"seals.json": b"[]"},
    "seals that are no JSON": lambda c: c | {"seals.json": b"\xff"},
    "seals without an end": lambda c: c | {"seals.json": b"[" * 60_000},
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_archive_is_one_sentence_and_writes_nothing(packed, tmp_path, how):
    rewrite(packed, HOSTILE[how])
    before = set(tmp_path.parent.rglob("*"))
    with pytest.raises(RunError, match=r"mine\.cwfed is not an archive of a run, or is damaged"):
        finished.read_run(packed)
    assert set(tmp_path.parent.rglob("*")) == before


def patched(content, name, size):
    """The size that the list of files says a file has, changed; its content is what it was."""
    place = content.rindex(name.encode()) - 46  # the entry in the list stands before its name
    assert content[place : place + 4] == b"PK\x01\x02"
    return content[: place + 24] + struct.pack("<I", size) + content[place + 28 :]


def test_an_archive_that_unpacks_to_more_than_it_says_is_not_unpacked(packed, monkeypatch):
    """100 MB of zeros that say they are 10 bytes: no more than these are unpacked, and they do not match."""
    rewrite(packed, lambda c: c | {"events.jsonl": b"0" * 10**8})
    packed.write_bytes(patched(packed.read_bytes(), "events.jsonl", 10))
    asked = []
    real = zlib.decompressobj

    class Watched:
        def __init__(self, *arguments):
            self._real = real(*arguments)

        def decompress(self, data, most=0):
            found = self._real.decompress(data, most)
            asked.append(len(found))
            return found

        def __getattr__(self, name):
            return getattr(self._real, name)

    monkeypatch.setattr(zlib, "decompressobj", Watched)
    with pytest.raises(RunError, match="not an archive of a run"):
        archive.read(packed)
    assert sum(asked) < 10**6


def test_a_list_of_a_million_files_is_not_read(tmp_path):
    """zipfile would make an object of each of them."""
    path = tmp_path / "many.cwfed"
    entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"x"
    directory = entry * 1000
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1000, 1000, len(directory), 0, 0)
    path.write_bytes(directory + end)
    assert len(zipfile.ZipFile(path).namelist()) == 1000  # it is an archive
    with pytest.raises(RunError, match="its list of files"):
        archive.read(path)


@pytest.mark.parametrize("content", [b"", b"x" * 21, b"x" * 1000, b"PK\x05\x06" + b"\0" * 18])
def test_what_is_no_archive_is_one_sentence(tmp_path, content):
    (tmp_path / "a.cwfed").write_bytes(content)
    with pytest.raises(RunError, match="not an archive of a run"):
        archive.read(tmp_path / "a.cwfed")


def test_a_missing_archive_is_one_sentence(tmp_path):
    with pytest.raises(RunError, match="does not exist"):
        archive.read(tmp_path / "none.cwfed")
    with pytest.raises(RunError, match="neither a folder nor an archive"):
        finished.collect([tmp_path / "none.cwfed"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_a_sentence_or_does_not_matter(packed, tmp_path, data):
    """Some bytes changed, or the end cut off: never another error, never another content."""
    whole, content = archive.read(packed), bytearray(packed.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(content), data.draw(st.integers(0, len(content)))]))
    (tmp_path / "damaged.cwfed").write_bytes(content[:cut])
    try:
        found = archive.read(tmp_path / "damaged.cwfed")
    except RunError:
        return
    assert found == whole

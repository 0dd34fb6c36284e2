"""A round of a deployed federation by step: real processes, TLS and keys on this machine.

    python benchmarks/flower_deployed.py [--nodes 4] [--rounds 3] [plain forks gate]

`plain` is Flower as it comes: SuperNodes that start a process for each message, which imports torch. `forks` has a fork server beside every SuperNode and looks for
work ten times a second; `gate` (what `cwfed flower up`, `serve` and `join` do) also has the gate that keeps nodes waiting for messages.

The server writes down when it sends messages and has all answers, the nodes when the process of a message began and when its work did and ended. A step is
the mean over messages; the first round, in which every node loads its data for the first time, is left out. The work is the paper's CNN on
the digits. A second table has the processor seconds of a round by program: on a machine that has all nodes they are what a round waits for. To compare with
another version, put its `src` on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from cwfed.federation import config as configs
from cwfed.flower.local import LocalFederation, node_name
from cwfed.flower.programs import marked

SERVER = """
import json, time
from pathlib import Path
from cwfed.flower import post, server_app

exchange = post.Post.exchange


def timed(self, grid, messages):
    began = time.time()
    kind, group = messages[0].metadata.message_type, messages[0].metadata.group_id
    yield from exchange(self, grid, messages)
    entry = {{"group": group, "kind": kind, "began": began, "ended": time.time()}}
    with Path({path!r}).open("a") as file:
        file.write(json.dumps(entry) + "\\n")


post.Post.exchange = timed
app = server_app()
"""

CLIENT = """
import json, os, time
from pathlib import Path
from flwr.clientapp import ClientApp
from cwfed.flower import client_app

inner = client_app()


def process_began():
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - float(Path("/proc/uptime").read_text().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")


class Timed(ClientApp):
    def __call__(self, message, context):
        began = time.time()
        reply = inner(message, context)
        about = message.metadata
        entry = {{"group": about.group_id, "kind": about.message_type, "process": process_began(), "began": began, "ended": time.time()}}
        with Path({path!r}).open("a") as file:
            file.write(json.dumps(entry) + "\\n")
        return reply


app = Timed()
"""

STEPS = ("a node takes the message", "its process is ready", "work", "the server has the answer")
PROGRAMS = {
    "gate": "cwfed.flower.gate",
    "SuperLink": "flower-superlink",
    "server": "flwr-serverapp",
    "helpers": "flower-superexec",
    "messages": "fork_server.keep",
    "SuperNodes": "flower-supernode",
    "processes of messages without a fork server": "flwr-clientapp",
}
"""A word of its command line, the first that fits."""
COMMANDS = "this program and Flower's commands"
TICK = os.sysconf("SC_CLK_TCK")


class Processors(threading.Thread):
    """Writes down every second how much processor time each program has had."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.seen = folder, list[tuple[float, Counter[str]]]()
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(1.0):
            self.seen.append((time.time(), self.now()))

    def now(self) -> Counter[str]:
        """Seconds by program, with the children that have ended."""
        sums = Counter({COMMANDS: sum(os.times()[:4])})
        for name in (entry.name for entry in (self.folder / "logs").glob("*.log")):
            for number in marked(f"{self.folder}:{name.removesuffix('.log')}"):
                with suppress(OSError):
                    line = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    numbers = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                    program = next((what for what, word in PROGRAMS.items() if word in line), "others")
                    sums[program] += sum(map(int, numbers[11:15])) / TICK
        return sums

    def between(self, first: float, last: float) -> Counter[str]:
        """What was spent between two times, up to a second."""
        before = max((seen for seen in self.seen if seen[0] <= first), key=lambda seen: seen[0], default=self.seen[0])
        after = min((seen for seen in self.seen if seen[0] >= last), key=lambda seen: seen[0], default=self.seen[-1])
        share = (last - first) / (after[0] - before[0])
        return Counter({what: share * (after[1][what] - before[1][what]) for what in after[1]})


class Federation(LocalFederation):
    """A trial with or without what makes it quick."""

    has_forks = has_gate = True

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | ({} if self.has_forks else {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1"})

    def start(self, name: str, *command: str) -> None:
        words = list(command)
        if "flower-supernode" in words and not self.has_forks:
            words = words[words.index("flower-supernode") :]
        super().start(name, *(words if name != "gate" or self.has_gate else ["sleep", "infinity"]))

    def start_superlink(self) -> None:
        if not self.has_gate:
            self.door = self.port
        super().start_superlink()


def measure(how: str, nodes: int, rounds: int) -> tuple[float, dict[str, float], float, dict[str, float]]:
    """Seconds of a round, by step, and how many of them are overhead: what the work of the slowest node does not explain; processor seconds by
    program.
    """
    settings = ["model.name=cnn", "train.lr=0.01", f"train.rounds={rounds}", "run.engine=loop"]
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        config = configs.load(None, settings)
        federation = Federation.prepare(here / "federation", config, nodes, timeout=600.0)
        federation.has_forks, federation.has_gate = how != "plain", how == "gate"
        app = here / "federation" / "app" / "federation"
        (app / "server_app.py").write_text(SERVER.format(path=str(here / "server.jsonl")))
        (app / "client_app.py").write_text(CLIENT.format(path=str(here / "clients.jsonl")))
        processors = Processors(federation.folder)
        processors.start()
        try:
            federation.start_superlink()
            for number in range(nodes):
                federation.register(node_name(number))
                federation.start_node(node_name(number))
            if problem := federation.follow(federation.submit(), lambda event: None):
                raise SystemExit(f"{problem}\n{(here / 'federation' / 'logs' / 'superlink.log').read_text()[-3000:]}")
        finally:
            processors.is_over.set()
            federation.close()
        sent = [json.loads(line) for line in (here / "server.jsonl").read_text().splitlines()]
        answered = [json.loads(line) for line in (here / "clients.jsonl").read_text().splitlines()]
    sums = dict.fromkeys(STEPS, 0.0)
    overhead = 0.0
    later = [entry for entry in sent if entry["group"] != "1"]
    for entry in later:
        mine = [a for a in answered if (a["group"], a["kind"]) == (entry["group"], entry["kind"])]
        times = [(entry["began"], a["process"], a["began"], a["ended"], entry["ended"]) for a in mine]
        for number, step in enumerate(STEPS):
            sums[step] += statistics.mean(t[number + 1] - t[number] for t in times)
        overhead += entry["ended"] - entry["began"] - max(a["ended"] - a["began"] for a in mine)
    counted = rounds - 1
    first = min(entry["began"] for entry in later)
    last = max(entry["ended"] for entry in sent)
    spent = {what: seconds / counted for what, seconds in processors.between(first, last).most_common()}
    return (last - first) / counted, {step: s / counted for step, s in sums.items()}, overhead / counted, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", nargs="*", default=["plain", "forks", "gate"])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"| {asked.nodes} nodes | round, s | overhead, s | {' | '.join(STEPS)} | took, s |")
    print(f"|---|{'---:|' * (3 + len(STEPS))}")
    processors = {}
    for how in asked.how:
        began = time.monotonic()
        seconds, steps, overhead, processors[how] = measure(how, asked.nodes, asked.rounds)
        parts = " | ".join(f"{steps[step]:.1f}" for step in STEPS)
        print(f"| {how} | {seconds:.1f} | {overhead:.1f} | {parts} | {time.monotonic() - began:.0f} |", flush=True)
    print("\nprocessor seconds of a round")
    for how, spent in processors.items():
        parts = ", ".join(f"{what} {seconds:.1f}" for what, seconds in spent.items())
        print(f"{how}: {sum(spent.values()):.1f}: {parts}")


if __name__ == "__main__":
    main()

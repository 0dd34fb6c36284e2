"""docs/algorithms.md and docs/methods/: every method and plug-in as its own file describes it.

    python tools/methods.py

What stands between `<!-- methods: PART -->` and `<!-- end -->` is made anew, from the docstrings, the hyper-parameters and what an algorithm says it
sends, keeps and costs; numbers come from docs/data/comparison.json. All else stays as it is. A method without a page is given one.

A row of docs/data/comparison.json: {"setting": text, "method": name, "received": %, "trained": %, "std": [received, trained] or null, "seeds": number,
"command": text}; both phases, always. Under "settings", by setting, the command for the method NAME: what a page says that has no number yet.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch

from cwfed import models
from cwfed.algorithms import ALGORITHMS, PLUGINS, FedAvg, build, setting
from cwfed.algorithms.fedala import TIMES
from cwfed.cli.console import attribute_docs
from cwfed.core.types import Cost, Params, Sizes, Start, Task
from cwfed.federation.cost import sizes, without_numbers
from cwfed.models import InputShape

DOCS = Path(__file__).parent.parent / "docs"
NUMBERS = json.loads((DOCS / "data" / "comparison.json").read_text(encoding="utf-8"))
CLASSES, CLIENTS = 10, 20
REFERENCE: tuple[str, InputShape, int, dict[str, Any]] = ("cnn", InputShape((3, 32, 32)), CLASSES, {})
IN = "the paper's CNN on 32x32x3, 10 classes, 20 clients that all take part"
LATER: Params = {TIMES: torch.tensor(1)}
"""Notes of a client that has trained before: FedALA's passes on receipt begin with its second round."""
PART = re.compile(r"<!-- methods: (\w+) -->.*?<!-- end -->", re.DOTALL)
NEW = """# {title}

<!-- methods: about -->
<!-- end -->

## How faithful

Nothing is written about this yet.

<!-- methods: numbers -->
<!-- end -->
"""
ELSEWHERE = (
    "(Public ", "Public ", "(In public", "(In a public", "(In the authors'", "In the authors'", "Differences to", "(A widely used",
)  # fmt: skip
"""How a paragraph begins that is about other people's code."""


@dataclasses.dataclass(frozen=True)
class Method:
    """What the code knows of a method, in the reference setting."""

    name: str
    """That of its page; a plug-in's is the name behind the `+`."""
    cls: type[FedAvg]
    algorithm: FedAvg
    """With its defaults; a plug-in stands over the first method that it can stand over."""
    task: Task
    network: Params
    """Shapes only."""
    sizes: Sizes
    cost: Cost

    @property
    def is_plugin(self) -> bool:
        """Whether it is a plug-in and nothing else."""
        return self.name not in ALGORITHMS

    @property
    def tensors(self) -> dict[str, int]:
        """By name, how many numbers."""
        return {name: prod(tensor.shape) for name, tensor in self.network.items()}

    @property
    def doc(self) -> str:
        """The text that its file opens with."""
        return inspect.cleandoc(sys.modules[self.cls.__module__].__doc__ or "")

    @property
    def paper(self) -> tuple[str, str]:
        """Title and year: of the file's first sentence, or of what the file says in brackets behind this method's name."""
        first, _, rest = " ".join(self.doc.split("\n\n")[0].split()).partition(". ")
        beside = re.search(rf"{self.cls.__name__} \(([^)]*), (\d{{4}})\)", " ".join(self.doc.split()))
        if beside:
            return beside[1], beside[2]
        found = re.fullmatch(r"(.*), (?:\w+ )?(\d{4})\.", rest)
        known_as = vars(self.cls).get("name", vars(self.cls).get("plugin", "-"))
        own = found and _slug(first).startswith(known_as)
        return (found[1], found[2]) if found and own else ("", "–")

    @property
    def uploaded(self) -> tuple[str, ...]:
        """The tensors of the network that go up."""
        return self.algorithm.uploaded(tuple(self.tensors), self.task)

    @property
    def kept(self) -> tuple[str, ...]:
        """The tensors of the network that stay with the client."""
        return self.algorithm.keeps(tuple(self.tensors), self.task)

    @property
    def stays(self) -> str:
        """What stays with a client, in words."""
        if getattr(self.algorithm, "norms", ()) and not self.kept:
            return "norm layers (the reference CNN has none)"
        return self.words(self.kept) + self.remembered

    @property
    def remembered(self) -> str:
        """What it keeps besides tensors of the network, in words."""
        found = self.algorithm.remember(Start(self.network))
        models, more = divmod(sum(prod(tensor.shape) for tensor in found.values()), PLAIN.sizes.model)
        said = ["", ", and as much again", ", and twice as much again"][models]
        return said + (f", and {_numbers(more)} more" if more else "")

    def words(self, names: Iterable[str]) -> str:
        """Tensors in words."""
        chosen = set(names)
        network, output = set(self.task.parameters), set(self.task.layers[self.task.output])
        own, beside = chosen & network, sorted(chosen - network)
        kinds = {
            frozenset(): "",
            frozenset(network): "the whole model",
            frozenset(output): "the output layer",
            frozenset(network - output): "all but the output layer",
        }
        few = ", ".join(f"`{name}` ({_numbers(self.tensors[name])})" for name in sorted(own))
        found = kinds.get(frozenset(own), few if len(own) < 4 else f"{len(own)} of {len(network)} tensors")
        groups: dict[str, int] = {}
        for name in beside:
            groups[name.partition(".")[0]] = groups.get(name.partition(".")[0], 0) + self.tensors[name]
        said = [found, *(f"`{group}` ({_numbers(size)})" for group, size in groups.items())]
        return ", ".join(part for part in said if part) or "nothing"

    @property
    def engines(self) -> str:
        """Every engine runs every method; what one of them does not do in its own way."""
        begin = Start({}, notes=LATER)
        return "all; on receipt client by client" if self.algorithm.passes("receipt", self.task, begin) else "all"


def _numbers(count: int) -> str:
    return f"{count:,} number{'s' * (count != 1)}"


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _beneath(plugin: str) -> str:
    """The first method, of these, that a plug-in can stand over."""
    return "cwfedavg" if plugin == "programme" else "fedavg"


def method(name: str, cls: type[FedAvg]) -> Method:
    """A method by its name, or a plug-in by the one behind its `+`."""
    algorithm = build(name if name in ALGORITHMS else f"{_beneath(name)}+{name}")
    plain = without_numbers(*REFERENCE)
    with torch.device("meta"):
        network = algorithm.adapt(copy.deepcopy(plain), str(plain.output_layer))
    task = models.task_of(network, CLIENTS, CLASSES)
    size = sizes(algorithm, plain, CLASSES, CLIENTS, CLIENTS)
    return Method(name, cls, algorithm, task, dict(network.named_parameters()), size, algorithm.costs(size)[0])


def methods() -> dict[str, Method]:
    """All methods, and the plug-ins that are no method by themselves, by the name of their page."""
    alone = {name: cls for name, cls in PLUGINS.items() if cls not in ALGORITHMS.values()}
    return {name: method(name, cls) for name, cls in (ALGORITHMS | alone).items()}


# --- parts of pages


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(header)
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def _first(rows: Iterable[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The first row as the header: Markdown has no table without one."""
    header, *others = rows
    return header, others


def _models(numbers: int) -> str:
    """So many numbers in models of FedAvg."""
    share = numbers / PLAIN.sizes.model
    return f"{share:.3g}" if 0 < share < 0.01 else f"{share:.2f}"


PLAIN = method("fedavg", ALGORITHMS["fedavg"])


def _what(cls: type[FedAvg]) -> str:
    return (cls.__doc__ or "").split("\n")[0].rstrip(".")


def overview(found: dict[str, Method]) -> list[str]:
    """One row a method."""
    header = (
        "method",
        "year",
        "what it does",
        "travels",
        "stays with a client",
        "cost beyond FedAvg",
        "reported on",
        "engines",
    )
    rows = (
        (f"[`{m.name}`](methods/{m.name}.md)", m.paper[1], _what(m.cls), m.cls.travels, m.stays, m.cls.work, m.cls.phase, m.engines)
        for m in found.values()
        if not m.is_plugin
    )  # fmt: skip
    return _table(header, (map(_cell, row) for row in rows))


def plugins(found: dict[str, Method]) -> list[str]:
    """One row a plug-in."""
    at = {cls: name for name, cls in ALGORITHMS.items()}
    rows = (
        (f"[`+{name}`](methods/{at.get(cls, name)}.md)", _what(cls), ", ".join(f"`{setting(f.name)}`" for f in dataclasses.fields(cls)) or "–")
        for name, cls in PLUGINS.items()
    )  # fmt: skip
    return _table(("plug-in", "what it adds", "settings"), (map(_cell, row) for row in rows))


def cost_table(found: dict[str, Method]) -> list[str]:
    """What a method moves and keeps, in models of FedAvg."""
    rows = (
        (
            f"`{m.name}`", _models(m.cost.down // CLIENTS), _models(m.cost.up // CLIENTS),
            _models(m.cost.server), _models(m.sizes.kept),
        )
        for m in found.values()
        if not m.is_plugin
    )  # fmt: skip
    return _table(("method", "down, a participant", "up, a participant", "the server keeps", "a client keeps"), rows)


def prose(doc: str) -> list[str]:
    """A docstring as Markdown: equations in blocks, limiting cases and other versions under headings of their own."""
    sections: dict[str, list[str]] = {"": [], "## Limiting cases": [], "## Other versions of it": []}
    place = ""
    for paragraph in doc.split("\n\n")[1:]:
        text = paragraph.strip("\n")
        if text.startswith("    "):
            sections[place].append(f"```text\n{textwrap.dedent(text)}\n```")
            continue
        text = " ".join(text.split())
        place = ""
        if limiting := re.match(r"Limiting cases?(, bit for bit)?[:.] ", text):
            place, text = "## Limiting cases", text[limiting.end() :]
            is_symbol = re.match(r"\w+ (=|->)", text)  # of the equations: it is written as there
            text = f"Bit for bit: {text}" if limiting[1] else text if is_symbol else f"{text[0].upper()}{text[1:]}"
        elif text.startswith(ELSEWHERE):
            place = "## Other versions of it"
            text = text[1:-1] if text.startswith("(") and text.endswith(")") else text
        elif text.startswith("The server "):
            continue  # it has a heading of its own, with what the code says about it
        sections[place].append(text)
    lines: list[str] = []
    for heading, paragraphs in sections.items():
        if paragraphs:
            lines += [heading, ""] if heading else []
            lines += [line for paragraph in paragraphs for line in (paragraph, "")]
    return lines


def settings(m: Method) -> list[str]:
    """Hyper-parameters with their defaults."""
    fields = dataclasses.fields(m.cls)
    if not fields:
        return ["It has no settings of its own.", ""]
    meanings, default = attribute_docs(m.cls), m.algorithm
    rows = (
        (f"`algorithm.{setting(f.name)}`", f"`{_default(getattr(default, f.name))}`", meanings.get(f.name, "")) for f in fields
    )  # fmt: skip
    return [*_table(("setting", "default", "meaning"), (map(_cell, row) for row in rows)), ""]


def _default(value: Any) -> str:
    if isinstance(value, FedAvg):
        return value.name
    return "none" if value is None else json.dumps(value) if isinstance(value, bool | str) else str(value)


def learns(m: Method) -> list[str]:
    """What the server is sent, and what is known to follow from it."""
    extras = m.algorithm.extras_spec(m.network, m.task)
    lines = [f"A client sends {m.words(m.uploaded)} and its number of samples."]
    if not m.uploaded and not extras:
        lines = ["Nothing is sent, and nothing is learnt."]
    if extras:
        parts = ", ".join(f"`{key}` ({_numbers(prod(spec.shape))})" for key, spec in extras.items())
        lines.append(f"Beside the model go up {parts}." if m.uploaded else f"What goes up is {parts}.")
    if any(spec.counts_samples for spec in extras.values()):
        lines.append("Its label counts are among them, in the clear.")
    if f"{m.task.output}.weight" in m.uploaded:
        lines.append(
            "The output layer is among it: from its change the server can tell which classes a client has ([measured](../privacy-evidence.md))."
        )
    paragraphs = (" ".join(p.split()) for p in m.doc.split("\n\n"))
    return [" ".join(lines), "", *(line for p in paragraphs if p.startswith("The server ") for line in (p, ""))]


def about(m: Method) -> list[str]:
    """All of a page that the code knows."""
    title, year = m.paper
    also = next((plugin for plugin, cls in PLUGINS.items() if cls is m.cls and not m.is_plugin), "")
    facts = [
        ("paper", f"{title}, {year}" if title else "none: a control" if not m.is_plugin else "none"),
        ("travels", m.cls.travels if not m.is_plugin or "travels" in vars(m.cls) else "what travels beneath it"),
        ("stays with a client", m.stays),
        ("cost", m.cls.work if not m.is_plugin or "work" in vars(m.cls) else "that of the method beneath it"),
        ("reported on", f"phase `{m.cls.phase}`" if not m.is_plugin else "the phase of the method beneath it"),
        ("engines", f"{m.engines}{' in `vmap`' if ';' in m.engines else ''}"),
        ("run it", f"`cwfed run --set algorithm.name={m.name if not m.is_plugin else f'{_beneath(m.name)}+{m.name}'}`"),
    ]  # fmt: skip
    if also:
        facts.append(("as a plug-in", f"`+{also}`, over other methods ([plug-ins](../algorithms.md#plug-ins))"))
    where = Path(inspect.getfile(m.cls)).relative_to(DOCS.parent)
    return [
        f"{_what(m.cls)}.",
        "",
        *_table(*_first(([f"**{key}**", _cell(value)] for key, value in facts))),
        "",
        "## How it works",
        "",
        *prose(m.doc),
        "## Settings",
        "",
        *settings(m),
        "## What the server learns",
        "",
        *learns(m),
        f"The code: [`{where}`](../../{where}).",
    ]


def _is_of(m: Method, measured: str) -> bool:
    """Whether what was measured is this method, or a combination that has this plug-in."""
    return measured == m.name or (m.is_plugin and m.name in measured.split("+")[1:])


def numbers(m: Method) -> list[str]:
    """Measured accuracies with the commands that make them, or the command alone."""
    lines = ["## Numbers", ""]
    rows = [row for row in NUMBERS["rows"] if _is_of(m, row["method"].partition(":")[0])]
    if rows:
        spread = lambda row, i: f" ± {row['std'][i]:.1f}" if row["std"] else ""  # noqa: E731
        lines += _table(
            ("setting", "as", "received, %", "trained, %", "seeds"),
            (
                (row["setting"], f"`{row['method']}`", f"{row['received']:.1f}{spread(row, 0)}", f"{row['trained']:.1f}{spread(row, 1)}", str(row["seeds"]))
                for row in rows
            ),
        )  # fmt: skip
        commands = dict.fromkeys(row["command"] for row in rows)
        lines += [
            "",
            "```sh",
            *commands,
            "```",
            "",
            "All methods side by side, and how to read them: [comparison](../comparison.md).",
        ]
        return lines
    name = f"{_beneath(m.name)}+{m.name}" if m.is_plugin else m.name
    commands = [command.replace("NAME", name) for command in NUMBERS["settings"].values()]
    return [*lines, "Not measured yet. The command that does it:", "", "```sh", *commands, "```"]


# --- pages


def filled(page: str, parts: dict[str, list[str]]) -> str:
    """The page with its parts as they should be."""

    def part(found: re.Match[str]) -> str:
        return "\n".join([f"<!-- methods: {found[1]} -->", "", *parts[found[1]], "", "<!-- end -->"])

    return PART.sub(part, page)


def current() -> dict[Path, str]:
    """Every page that is made here, as it should be."""
    found = methods()
    at = DOCS / "algorithms.md"
    parts = {"overview": overview(found), "plugins": plugins(found), "costs": cost_table(found)}
    pages = {at: filled(at.read_text(encoding="utf-8"), parts)}
    for name, m in found.items():
        path = DOCS / "methods" / f"{name}.md"
        title = m.doc.partition(".")[0] if m.paper[0] or m.is_plugin else m.cls.__name__
        old = path.read_text(encoding="utf-8") if path.exists() else NEW.format(title=title)
        pages[path] = re.sub(r"\n{3,}", "\n\n", filled(old, {"about": about(m), "numbers": numbers(m)}))
    return pages


if __name__ == "__main__":
    (DOCS / "methods").mkdir(exist_ok=True)
    for path, text in current().items():
        path.write_text(text, encoding="utf-8")

"""What a setting is: type, default, meaning, whether it changes results, since which version.

The fields of `sections.py` are made with `setting`. From them come the checks, the tables of docs/configuration.md
(`tools/settings.py`), what a resumed run may change, the hash of an experiment, and the former names that still work.
"""

from __future__ import annotations

import hashlib
import json
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from cwfed.core.errors import ConfigError, RenamedSetting

Changes = Literal["results", "length", "nothing"]
"""What another value of a setting means: another experiment; the same one, longer; the same one, carried out in another way."""

_NOT_GIVEN: Any = object()
_BEYOND = 10**6
"""Upper bounds from here on only protect memory from files of unknown origin; the docs do not show them."""


def setting(
    default: Any = _NOT_GIVEN,
    *,
    factory: Callable[[], Any] | None = None,
    changes: Changes = "results",
    since: str = "0.1",
    before: Any = _NOT_GIVEN,
    was: str = "",
    **bounds: float,
) -> Any:
    """A field of a section; its docstring is its meaning, in one or two sentences.

    `before` is the value that stands for the behaviour before the setting existed. With that value it is no part of an experiment's hash,
    so that runs from before can be resumed. A new setting needs it.
    `was` is the key, with its section, that the setting had before it was renamed.
    """
    about = Described(changes=changes, since=since, was=was, has_before=before is not _NOT_GIVEN, before=before)
    given = {"default_factory": factory} if factory else {"default": default}
    return Field(**given, **bounds, json_schema_extra={_ABOUT: about})  # type: ignore[call-overload]


_ABOUT = "about"


@dataclass(frozen=True)
class Described:
    """What is known of a setting."""

    changes: Changes
    since: str
    was: str
    has_before: bool
    before: Any
    key: str = ""
    """Its key, with the section."""
    kind: str = ""
    """Its type, for people."""
    default: Any = None
    meaning: str = ""


class Section(BaseModel):
    """A table of the config file; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


def describe(config: type[Section]) -> Mapping[str, Described]:
    """All settings by their keys, section by section; those of the algorithm, whose keys are not fixed, are not among them."""
    found: dict[str, Described] = {}
    for name, section in config.model_fields.items():
        if isinstance(section.annotation, type) and issubclass(section.annotation, Section):
            for key, about in section.annotation.model_fields.items():
                found[f"{name}.{key}"] = _described(f"{name}.{key}", about)
    return MappingProxyType(found)


def _described(key: str, about: FieldInfo) -> Described:
    extra = about.json_schema_extra
    if not isinstance(extra, dict) or not isinstance(extra.get(_ABOUT), Described) or not about.description:
        raise TypeError(f"{key} is not described: make it with `setting`, and give it a docstring")
    known: Any = extra[_ABOUT]
    meaning = " ".join(about.description.split())
    default = about.get_default(call_default_factory=True)
    return Described(
        known.changes, known.since, known.was, known.has_before, known.before, key, _kind(about), default, meaning
    )


def _kind(about: FieldInfo) -> str:
    """Type and bounds in a few words."""
    kind: Any = about.annotation
    if typing.get_origin(kind) is Literal:
        return " or ".join(f'"{value}"' for value in typing.get_args(kind))
    names: dict[Any, str] = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    words = names.get(kind) or {"list": "list of texts", "dict": "table"}[typing.get_origin(kind).__name__]
    for bound in about.metadata:
        match bound:
            case Ge(ge=value):
                words += f" ≥ {value}"
            case Gt(gt=value):
                words += f" > {value}"
            case Le(le=value) if float(str(value)) < _BEYOND:
                words += f", ≤ {value}"
            case Lt(lt=value):
                words += f", < {value}"
    return words


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


# --- which runs are the same experiment


def free_to_change(known: Mapping[str, Described]) -> frozenset[str]:
    """Settings that a resumed run may change: they do not change its results."""
    return frozenset(key for key, about in known.items() if about.changes == "nothing")


def hashed(table: dict[str, Any], known: Mapping[str, Described], before: Mapping[str, Any]) -> str:
    """A hash of all settings that a resumed run must share, under their first names.

    `before`: by key, the value that stands for the behaviour before an algorithm's hyper-parameter existed.
    """
    settings = {}
    for key, value in flat(table).items():
        about = known.get(key)
        if about is None and (key not in before or value != before[key]):
            settings[key] = value
        if about and about.changes == "results" and not (about.has_before and value == about.before):
            settings[about.was or key] = value
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


# --- former names


def former_names(known: Mapping[str, Described]) -> Mapping[str, str]:
    """The current keys by the keys of earlier versions."""
    return MappingProxyType({about.was: key for key, about in known.items() if about.was})


def renamed(table: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Nested settings under their current names; a warning for each former one."""
    for old, new in names.items():
        (there, key), (here, name) = old.split("."), new.split(".")
        section = table.get(there)
        if not isinstance(section, dict) or key not in section:
            continue
        if name in _section(table, here):
            raise ConfigError(f"{old} is the former name of {new}: give only {new}")
        table = table | {there: {k: v for k, v in section.items() if k != key}}
        table = table | {here: _section(table, here) | {name: section[key]}}
        tell(old, new)
    return table


def _section(table: dict[str, Any], name: str) -> dict[str, Any]:
    found = table.get(name, {})
    return found if isinstance(found, dict) else {}


def tell(old: str, new: str) -> None:
    """Warn that a key has a new name, once in a process."""
    warnings.warn(f"the setting {old} is called {new} now; the former name still works", RenamedSetting, stacklevel=3)


def rows(known: Mapping[str, Described], section: str) -> Iterator[str]:
    """The table of a section, in Markdown."""
    yield "| key | type | default | changes results | since | meaning |"
    yield "|---|---|---|---|---|---|"
    words = {"results": "yes", "length": "more continue the run", "nothing": "no"}
    for key, about in known.items():
        if key.startswith(f"{section}."):
            default = json.dumps(about.default, ensure_ascii=False)
            former = f" (`{about.was}` in earlier versions)" if about.was else ""
            cells = (
                f"`{key.removeprefix(f'{section}.')}`",
                about.kind,
                f"`{default}`",
                words[about.changes],
                about.since,
                about.meaning + former,
            )
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

"""Plug-ins: parts that can be added to other methods, as in "cwfedavg+dbe".

A plug-in is an algorithm whose class sets `plugin`, its name after a `+`. Every hook that it overrides calls super() and adds its part, so it
can be added to any method. A combination is a class that is made here, with the fields of all its parts:

    "fedavg+prior+owners"   is   class FedAvg+Owners+Prior(Owners, Prior, FedAvg)

The order in which plug-ins are named does not matter: they are sorted, so that one set has one name.

A plug-in says in `not_over` to what it cannot be added: by the name of a method or plug-in, or by a hook that it relies on, which the method
must not have replaced. If it can only be added to a certain method, it derives from that method's class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from inspect import get_annotations
from typing import Any

from cwfed.algorithms.fedavg import FedAvg
from cwfed.core.errors import ConfigError

JOINT = "+"


def canonical(name: str) -> str:
    """The one name of a combination: its plug-ins sorted."""
    base, *plugins = name.split(JOINT)
    return JOINT.join([base, *sorted(plugins)])


def parts_of(cls: type[FedAvg]) -> tuple[type[FedAvg], ...]:
    """The method and the plug-ins of a combination; for any other class the class itself."""
    parts: tuple[type[FedAvg], ...] = vars(cls).get("parts", (cls,))
    return parts


@cache
def combine(names: tuple[str, ...], classes: tuple[type[FedAvg], ...]) -> type[FedAvg]:
    """The class of a method (the first one) with plug-ins; always the same class for the same parts."""
    base, *plugins = classes
    _check(names, classes)
    said: dict[str, Any] = {
        "__doc__": " With ".join([_first_line(base), *(_first_line(plugin) for plugin in plugins)]),
        "__module__": __name__,
        "name": JOINT.join(names),
        "parts": classes,
        "work": "; ".join(cls.work for cls in classes if cls is base or "work" in vars(cls)),
        "travels": "; ".join(cls.travels for cls in classes if cls is base or "travels" in vars(cls)),
    }
    made = type(JOINT.join(cls.__name__ for cls in classes), (*plugins, base), said)
    return dataclasses.dataclass(frozen=True)(made)


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").split("\n")[0]


def _check(names: Sequence[str], classes: Sequence[type[FedAvg]]) -> None:
    """ConfigError for a combination that makes no sense."""
    (base, method), *plugins = zip(names, classes, strict=True)
    whole = JOINT.join(names)
    for name, plugin in plugins:
        if not getattr(plugin, "plugin", ""):
            raise ConfigError(f"{whole}: {name} is not a plug-in: its class does not set `plugin`")
        for needed in plugin.__mro__[1:-1]:
            if not (hasattr(needed, "plugin") or issubclass(method, needed)):
                raise ConfigError(f"{whole}: {name} can only be added to {getattr(needed, 'name', needed.__name__)}")
        if names[1:].count(name) > 1:
            raise ConfigError(f"{whole}: {name} is named twice")
        for other, under in ((base, method), *(pair for pair in plugins if pair[0] != name)):
            if issubclass(under, plugin):
                raise ConfigError(f"{whole}: {other} already contains {name}")
            if why := _why_not(plugin, under, is_method=other == base):
                raise ConfigError(f"{whole}: {name} cannot be added to {other}: {why}")
            if shared := _fields(plugin, besides=under) & _fields(under, besides=plugin):
                setting = min(shared)
                raise ConfigError(
                    f"{whole}: {name} and {other} both have a setting {setting!r}: it would not be clear which one is meant"
                )


def _why_not(plugin: type[FedAvg], under: type[FedAvg], is_method: bool) -> str:
    """Why a plug-in cannot be added to a method or another plug-in; "" if it can.

    Plug-ins add to hooks and do not replace them, so replaced hooks are looked for only in a method.
    """
    not_over: Mapping[str, str] = getattr(plugin, "not_over", {})
    for what, why in not_over.items():
        is_named = what in (vars(under).get("name"), *(cls.plugin for cls in _plugins_in(under)))
        if is_named or (is_method and _replaces(under, what)):
            return why
    return ""


def _plugins_in(cls: type[FedAvg]) -> list[Any]:
    """The plug-ins that a class is or derives from."""
    return [one for one in cls.__mro__ if "plugin" in vars(one)]


def _replaces(method: type[FedAvg], hook: str) -> bool:
    """Whether a method has a hook of its own. One that it has from a plug-in, which it is or derives from, adds to what is beneath."""
    origin = next((cls for cls in method.__mro__ if hook in vars(cls)), FedAvg)
    return origin not in FedAvg.__mro__ and "plugin" not in vars(origin)


def _fields(cls: type[FedAvg], besides: type[FedAvg]) -> set[str]:
    """The settings of a class that it does not share with another by inheritance."""
    known = {field.name for field in dataclasses.fields(cls)}
    origins = set(cls.__mro__) - set(besides.__mro__)
    return {name for origin in origins for name in get_annotations(origin) if name in known}

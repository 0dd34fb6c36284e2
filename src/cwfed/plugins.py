"""The user's own code by name: "module:function", found in the working directory or the installed packages."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from cwfed.errors import ConfigError, did_you_mean


def load_object(name: str, what: str) -> Any:
    """The object called "module:attribute"; `what` names its role in the error."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise ConfigError(f'{what} {name!r} must look like "module:name"')
    if os.getcwd() not in sys.path:  # a console script does not have the working directory there
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # it is the user's code: whatever stops it is the answer
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} {name!r}: the module {module_name!r} cannot be imported ({reason})") from None
    if not hasattr(module, attribute):
        near = did_you_mean(attribute, [n for n in vars(module) if not n.startswith("_")])
        raise ConfigError(f"{what} {name!r}: {module_name} has no {attribute!r}; {near}")
    return getattr(module, attribute)

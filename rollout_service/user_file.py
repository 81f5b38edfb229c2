"""Files of a user, imported by their path: environments, rewards, filters.

Invariant: a file is a module of `sys.modules` while it runs, as dataclasses and pickles want it.
It must never import what a process of a reward does not need: that starts with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from asyncrl.core.errors import ConfigError


def import_file(path: Path, what: str, hint: str = "") -> ModuleType:
    """Return the module in the file `path`, run anew.

    Args:
        what: Name of the file in errors.

    Raises:
        ConfigError: There is no such file, or it cannot be imported.
    """
    if not path.is_file():
        raise ConfigError(f"{what} {path} does not exist", hint=hint)
    digest = hashlib.blake2b(str(path.absolute()).encode(), digest_size=4).hexdigest()
    name = f"asyncrl_user_{path.stem}_{digest}"  # two files of one name are two modules
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything when it is imported
        del sys.modules[name]
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} {path} cannot be imported: {said}") from error
    return module

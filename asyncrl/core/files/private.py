"""Files and folders that no other user of a machine can open, name or prepare.

`/tmp` and `/dev/shm` are everybody's. A name there that others could know beforehand may be theirs already,
as a file, a folder or a link. So names are derived from a secret of the start, folders are made exclusively
and checked, and what belongs to others is never read, obeyed or removed.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from asyncrl.core.errors import ConfigError

SECRET_BYTES = 16


def make_secret() -> str:
    """Return a new secret, as text."""
    return secrets.token_hex(SECRET_BYTES)


def derive_name(secret: str, purpose: str) -> str:
    """Return a name of 32 characters that nobody can guess who lacks `secret`, nor from another purpose's.

    >>> # derive_name(secret, "segments"); derive_name(secret, "membership/3")
    """
    assert secret, "without a secret everybody can derive the name"
    return hmac.digest(secret.encode(), purpose.encode(), "sha256").hex()[:32]


def keep_others_out(*, may_read: bool = False) -> None:
    """Let nobody else open what this process and its children make from now on, whatever its umask was.

    Who can write a run's folder can change its configuration, which runs code; who can read its logs sees
    prompts, and what agents and rewards say. With `may_read` others are kept from writing only.
    """
    mask = 0o022 if may_read else 0o077
    os.umask(os.umask(mask) | mask)
    keep_compiled_code_own()


def keep_compiled_code_own() -> None:
    """Have PyTorch keep what it compiles in this user's home, where nobody has told it another place.

    Its own choice is `/tmp/torchinductor_<user>`: who makes that folder first runs code in every process that
    compiles. Must run before torch is asked to compile.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(caches, "asyncrl", "torchinductor"))


def make_own(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone; what is there stays."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def make_private(folder: Path) -> None:
    """Make a folder that only this user can open, or check that it is one.

    Raises:
        ConfigError: It is another user's, open to others, or no folder: its name may have been waited for.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} is no folder private to this user", hint="Remove it, and start again")


def is_own(path: Path) -> bool:
    """Tell whether something is there under this name that belongs to this user; a link counts itself."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False

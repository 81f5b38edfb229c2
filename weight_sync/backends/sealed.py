"""A store of torch.distributed that only members can read: names and values are sealed with their secret.

A `TCPStore` asks nobody who they are, and lists every name on request: whoever connects could read where
members listen, and be one of them. Here a stranger sees names and values that tell nothing, and none of his
own is taken. What he can do is delete or overwrite them: then a group does not form.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch.distributed import Store

from asyncrl.core.files.private import derive_name

NONCE_BYTES = 12


class SealedStore(Store):
    """The part of `store` that is a group's; has what process groups call (seen with torch 2.13).

    Whoever makes a process group with it keeps it: C++ calls these methods, and holds no reference to them.

    Args:
        group: Name of the group, of which nothing is seen in the store: `membership/3`, `learner`.
    """

    def __init__(self, store: Store, secret: str, group: str) -> None:
        super().__init__()
        self._store: Any = store  # whose type stub lacks half of it
        self._given = secret, group
        self._clones: list[SealedStore] = []
        self._secret = derive_name(secret, group)
        self._cipher = AESGCM(bytes.fromhex(self._secret))

    def clone(self) -> SealedStore:
        """Return a connection of its own to the same part, for another thread; lives as long as this one."""
        self._clones.append(SealedStore(self._store.clone(), *self._given))
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        """Seal `value` for this key alone."""
        name, nonce = self._name(key), os.urandom(NONCE_BYTES)
        plain = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(name, nonce + self._cipher.encrypt(nonce, plain, name.encode()))

    def get(self, key: str) -> bytes:
        """Return what a member has set; waits for it.

        Raises:
            RuntimeError: It was no member, or nobody within the store's timeout.
        """
        name = self._name(key)
        sealed = self._store.get(name)
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError) as error:
            raise RuntimeError(f"what stands under '{key}' in the store is of no member") from error

    def delete(self, key: str) -> None:
        """Remove a value."""
        self._store.delete_key(self._name(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        names = [self._name(key) for key in keys]
        self._store.wait(names, *([] if timeout is None else [timeout]))

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys are set."""
        return bool(self._store.check([self._name(key) for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Count up; a number is no secret, and a stranger can change it."""
        return int(self._store.add(self._name(key), amount))

    def _name(self, key: str) -> str:
        return derive_name(self._secret, key)

"""A promise that was broken (pure)."""

from __future__ import annotations


class Violation(AssertionError):
    """`promise`: S1 to S5, `eval`, `live` or `bug`."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise = promise
        self.what = what

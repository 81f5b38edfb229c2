"""Findings of an examination (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: Its name.
        verdict: `ok`; `warn`: a run may suffer; `fail`: a run cannot work.
        found: The observed state.
        advice: A remedy, empty where all is well.
    """

    what: str
    verdict: Verdict
    found: str
    advice: str = ""


def judge(what: str, found: str, is_ok: bool, advice: str, otherwise: Verdict = "warn") -> Finding:
    """Return the finding, with its advice only where it is needed."""
    return Finding(what, "ok", found) if is_ok else Finding(what, otherwise, found, advice)

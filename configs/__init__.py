"""The shipped configurations. `asyncrl up quickstart` finds them by name, also from a wheel."""

from __future__ import annotations

from pathlib import Path


def shipped() -> dict[str, Path]:
    """Return every shipped configuration by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}

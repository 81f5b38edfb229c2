"""Check of `Any` in the shipped packages: fails unless the count of each equals its maximum.

Owns the maxima. Invariant: they are only ever lowered: a package with more fails, and so does one with
fewer, until its maximum here says so. `object` is for what is really opaque; a struct, a `TypedDict`, a
`Protocol` or a type variable says what is known (docs/adr/0009-a-struct-per-edge.md).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

MAXIMA: Mapping[str, int] = {
    "asyncrl": 81,
    "learner": 8,
    "rollout_service": 1,
    "weight_sync": 9,
}


def count_any(text: str) -> int:
    """Return how often a module names `Any`: as a name, as `typing.Any`, or imported under another name.

    >>> count_any("from typing import Any\\nx: dict[str, Any]")
    1
    """
    return sum(_is_any(node) for node in ast.walk(ast.parse(text)))


def _is_any(node: ast.AST) -> bool:
    match node:
        case ast.Name(id="Any") | ast.Attribute(attr="Any"):
            return True
        case ast.alias(name="Any", asname=str()):
            return True
    return False


def violations(root: Path, maxima: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each package below `root` that has more or fewer than its maximum."""
    for package, most in maxima.items():
        found = sum(count_any(path.read_text(encoding="utf-8")) for path in (root / package).rglob("*.py"))
        if found > most:
            yield f"{package} names `Any` {found} times, at most {most}: give the value a type"
        elif found < most:
            yield f"{package} names `Any` {found} times: lower its maximum of {most} in tools/untyped.py"


def main() -> int:
    """Print what is wrong; return 1 if anything is."""
    found = list(violations(Path(), MAXIMA))
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    print(f"Any: at most {sum(MAXIMA.values())} times in {', '.join(MAXIMA)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

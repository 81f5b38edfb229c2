"""`asyncrl bench plot FILE [PNG]`: draws a file of rows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plots import draw
from benchmarks.rows import RowFile


def main(arguments: Sequence[str]) -> int:
    """Draw as the command line says, print where, and return the exit code."""
    parser = argparse.ArgumentParser(prog="asyncrl bench plot", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="that --json wrote")
    parser.add_argument("picture", type=Path, nargs="?", metavar="PNG", help="else FILE with .png")
    given = parser.parse_args(arguments)
    target = given.picture or given.file.with_suffix(".png")
    draw(RowFile.read(given.file).rows, target)
    print(target)
    return 0

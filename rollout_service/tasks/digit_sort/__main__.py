"""`python -m rollout_service.tasks.digit_sort FOLDER [--seed N]` makes the demo's model and data."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from rollout_service.tasks.digit_sort.folder import MARKER, Recipe, make_folder


def main() -> None:
    """Make the folder and print what it holds as JSON."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m rollout_service.tasks.digit_sort", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = make_folder(arguments.folder, Recipe(seed=arguments.seed))
    print(json.dumps({"folder": str(folder), **json.loads((folder / MARKER).read_text())}))


if __name__ == "__main__":
    main()

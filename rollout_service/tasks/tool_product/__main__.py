"""`python -m rollout_service.tasks.tool_product FOLDER [--seed N]` makes the task's model and data."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from rollout_service.tasks.tool_product.folder import Recipe, make_folder


def main() -> None:
    """Make the folder that the command line names, and print it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m rollout_service.tasks.tool_product", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_folder(arguments.folder, Recipe(seed=arguments.seed)))


if __name__ == "__main__":
    main()

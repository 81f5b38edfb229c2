"""`python -m rollout_service.tasks.tiny_text FOLDER [--seed N]` makes the model unless it is there."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollout_service.tasks.tiny_text.model import make_folder


def main() -> None:
    """Make the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m rollout_service.tasks.tiny_text", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_folder(arguments.folder, arguments.seed))


if __name__ == "__main__":
    main()

"""`python -m rollout_service.tasks [--seed N | --again] TASK FOLDER` makes a built-in task's model and data.

`--again` trains the model that ships in the task's `warm_started/`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

from rollout_service.tasks import tiny_text
from rollout_service.tasks.digit_sort import folder as digit_sort
from rollout_service.tasks.tool_product import folder as tool_product
from rollout_service.tasks.warm_started import make_again

MAKERS: dict[str, Callable[[Path, int], Path]] = {
    "digit_sort": lambda folder, seed: digit_sort.make_folder(folder, digit_sort.Recipe(seed=seed)),
    "tiny_text": tiny_text.make_folder,
    "tool_product": lambda folder, seed: tool_product.make_folder(folder, tool_product.Recipe(seed=seed)),
}
WARM_STARTS = {
    task.TASK: (task.Recipe.seed, task.Recipe.num_warm_start_steps, task.save_warm_start)
    for task in (digit_sort, tool_product)
}


def main() -> None:
    """Make the folder that the command line names, and print it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m rollout_service.tasks", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="the warm-started model alone")
    parser.add_argument("task", choices=MAKERS)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    if not given.again:
        print(MAKERS[given.task](given.folder, given.seed))
    elif given.task not in WARM_STARTS:
        parser.error(f"{given.task} has no warm-started model")
    else:
        print(make_again(given.task, given.folder, *WARM_STARTS[given.task]), end="")


if __name__ == "__main__":
    main()

"""`asyncrl init`: the files that a run of one's own begins with. Never overwrites one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from asyncrl.cli.up import find_config
from asyncrl.core.config.load import load_config
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import rewards
from configs import find_recipe

CONFIG, REWARD = "cluster.yaml", "my_reward.py"
HEAD = """\
# A run of asyncrl. Every key, its meaning and its default: docs/configuration.md, or `asyncrl plan --schema`.
#   asyncrl plan cluster.yaml       what it will take
#   asyncrl up cluster.yaml         start it and watch it      asyncrl status   asyncrl down
# Paths are read from the directory in which asyncrl is called. Made from the preset '{preset}'.
"""
YOURS = f"reward: {{fn: {REWARD}:score}} # yours; `asyncrl score` tries it on a file of answers"
REWARD_TEXT = '''\
"""The reward: what an answer is worth. Called in processes of its own, so it may be slow or crash."""


def score(response, ground_truth, extra_info):
    """Return a finite number, the higher the better.

    response: the text that the model answered with.
    ground_truth: what the prompt's row has under that name.
    extra_info: whatever else its row has, as a dictionary.
    """
    return float(response.strip() == str(ground_truth).strip())
'''


def write_starter(folder: Path, preset: str) -> tuple[list[Path], list[str]]:
    """Write `cluster.yaml` and a reward beside it.

    Returns:
        What was written, and a line for each data file that is not in `folder`: where it comes from.

    Raises:
        ConfigError: One of them is there already, or there is no such preset. Nothing was written.
    """
    config = find_config(preset)
    text, data = config.read_text(encoding="utf-8"), load_config(config).data
    paths = dict.fromkeys(source.path for source in (*data.train, *(data.eval or ())))
    recipes = {path: recipe for path in paths if (recipe := find_recipe(text, path))}
    files = {folder / CONFIG: _configuration(text, preset, recipes.values()), folder / REWARD: REWARD_TEXT}
    there = [str(path) for path in files if path.exists()]
    if there:
        verb = "is" if len(there) == 1 else "are"
        it = "it" if len(there) == 1 else "them"
        raise ConfigError(
            f"{' and '.join(there)} {verb} there already", hint=f"Choose another folder, or remove {it}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        with path.open("x", encoding="utf-8") as file:
            file.write(content)
    return list(files), [recipe for path, recipe in recipes.items() if not (folder / path).exists()]


def _configuration(text: str, preset: str, recipes: Iterable[str]) -> str:
    """Return the preset with a head of its own, and the example's reward where that is the same."""
    head = HEAD.format(preset=preset) + "".join(f"# {recipe}\n" for recipe in recipes)
    body = re.sub(r"\A(#.*\n)+", "", text)
    found = re.search(r"^reward: \{fn: (\w+)\}.*$", body, re.MULTILINE)
    if found is None:
        return head + body  # its reward is several lines: left as it is
    facts = rewards().get(found[1])
    is_same = facts is not None and facts.compares_text
    lines = (YOURS, f"# {found[0]}") if is_same else (found[0], f"# {YOURS}")
    return head + body.replace(found[0], "\n".join(lines), 1)

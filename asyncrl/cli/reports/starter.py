"""`asyncrl init`: the files that a run of one's own begins with. Never overwrites one."""

from __future__ import annotations

import re
from pathlib import Path

from asyncrl.cli.up import find_config
from asyncrl.errors import ConfigError

CONFIG, REWARD = "cluster.yaml", "my_reward.py"
HEAD = """\
# A run of asyncrl. Every key, its meaning and its default: docs/configuration.md, or `asyncrl plan --schema`.
#   asyncrl plan cluster.yaml       what it will take
#   asyncrl up cluster.yaml         start it and watch it      asyncrl status   asyncrl down
# Paths are read from the directory in which asyncrl is called. Made from the preset '{preset}'.
"""
REWARD_LINE = f"reward: {{fn: {REWARD}:score}} # yours; `asyncrl score` tries it on a file of answers"
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


def write_starter(folder: Path, preset: str) -> list[Path]:
    """Write `cluster.yaml` and a reward beside it; return what was written.

    Raises:
        ConfigError: One of them is there already, or there is no such preset. Nothing was written.
    """
    text = _configuration(find_config(preset).read_text(encoding="utf-8"), preset)
    files = {folder / CONFIG: text, folder / REWARD: REWARD_TEXT}
    there = [str(path) for path in files if path.exists()]
    if there:
        raise ConfigError(
            f"{' and '.join(there)} is there already", hint="Choose another folder, or remove it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        with path.open("x", encoding="utf-8") as file:
            file.write(content)
    return list(files)


def _configuration(text: str, preset: str) -> str:
    """Return the preset with a head of its own and the example's reward; its own is kept as a comment."""
    body = re.sub(r"\A(#.*\n)+", "", text)
    if re.search(r"^reward: \{.*$", body, re.MULTILINE) is None:
        return HEAD.format(preset=preset) + body  # its reward is several lines: left as it is
    return HEAD.format(preset=preset) + re.sub(
        r"^(reward: \{.*)$", rf"{REWARD_LINE}\n# \1", body, count=1, flags=re.MULTILINE
    )

"""A task of one's own for whole runs: a tiny model of any form, its tokenizer, data, and a reward."""

from __future__ import annotations

from pathlib import Path

from rollout_service.tasks.digit_sort.examples import draw_split
from rollout_service.tasks.digit_sort.folder import write_prompts
from rollout_service.tasks.digit_sort.vocabulary import VOCABULARY, build_tokenizer
from tests.rollout.engine.families import Form

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 11 / 10
"""
"""The answers of a random model are never right: a task's own reward would change no weights."""


def write_task(folder: Path, form: Form) -> tuple[str, ...]:
    """Write the task into `folder`, and return the settings of a run that trains the model on it."""
    form.build(0).save_pretrained(folder)
    others = {f"<{index}>": index for index in range(len(VOCABULARY), form.vocab_size)}
    build_tokenizer({**VOCABULARY, **others}).save_pretrained(folder)
    write_prompts(folder / "train.parquet", draw_split(0, 64, 8).train, "train")
    (folder / "reward.py").write_text(REWARD)
    return (
        f"model.path={folder}",
        f"data.train={folder / 'train.parquet'}",
        "data.eval=null",
        "eval.every_steps=0",
        f"reward.fn={folder / 'reward.py'}:compute_score",
        "rollout.max_tokens=16",
        "learner.lr=1e-3",
        "learner.warmup_steps=0",
    )

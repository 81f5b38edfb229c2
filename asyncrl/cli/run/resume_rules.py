"""Keys that must not change between two starts of one run (pure).

Owns the one list of them: `up` refuses by it, `plan` and docs/configuration.md show it. A key outside the
list may change; its new value holds from the next start on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncrl.core.config.conflicts import WITH_GREEDY, WITH_VALUES
from asyncrl.core.config.tree import Config, LoraSection

SAME_ON_RESUME: Mapping[str, str] = {
    "run.seed": "the order of prompts and every sample's seed follow from it",
    "model.path": "checkpoints hold this model's weights",
    "model.lora": "checkpoints hold adapters of this rank on these matrices, or all weights",
    "data.train": "the journal counts prompts by their place in it; its digest is checked too",
    "data.order": "the journal goes on where that order was left",
    "rollout.group_size": "the journal holds groups of that size",
    "learner.groups_per_step": "tickets belong to steps by their position: position // groups_per_step",
}
"""A key, and why a journal or a checkpoint depends on it."""
CHANGES_ON_RESUME: Mapping[str, str] = {
    "algorithm.advantage": "not to `remax`, which needs a greedy answer in each journalled group",
    "algorithm.kl.coef": "the changed one is in force; of an adaptive one, what training has made of it",
    "critic.path": "not while `algorithm.advantage` needs values: checkpoints hold the critic's weights",
    "learner.tp, pp, vpp, cp, dp": "checkpoints are read by any layout of ranks",
    "learner.lr, critic.lr": "in force at once, times what the guard has made of it",
    "learner.steps": "a run that is done goes on when it is raised",
    "rollout.*": "but `group_size`; the number and the kind of replicas too",
    "staleness.max_lag": "in force for what is admitted from then on",
}
"""Keys that are often changed on resume, and the effect of the change."""


def find_breaks(before: Config, after: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each change with which a run cannot go on."""
    for key, why in SAME_ON_RESUME.items():
        old, new = _value(before, key), _value(after, key)
        if old != new:
            yield key, f"{key}: was {_plain(old)}, is {_plain(new)}; {why}"
    old, new = before.algorithm.advantage, after.algorithm.advantage
    if new in WITH_GREEDY and old not in WITH_GREEDY:
        what = f"algorithm.advantage: was {old!r}, is {new!r}, which needs a greedy answer per group"
        yield "algorithm.advantage", what
    was, now = before.critic.path, after.critic.path
    if new in WITH_VALUES and (old not in WITH_VALUES or was != now):
        yield "critic", f"critic: was {was!r} under {old}, is {now!r} under {new}"


def _value(config: Config, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _plain(value: object) -> str:
    """Return a value as one writes it in a configuration: of a source its path, and what else was set."""
    if isinstance(value, LoraSection):
        return repr(value.model_dump(mode="json", exclude_defaults=True))
    if not isinstance(value, tuple):
        return repr(value)
    sources = (one.model_dump(mode="json", exclude_defaults=True) for one in value)
    return ", ".join(repr(one["path"] if len(one) == 1 else one) for one in sources)

"""Prefix caching of a run: whether equal prompts share their KV cache. The one place that resolves `auto`."""

from __future__ import annotations

from asyncrl.core.config.tree import Config
from asyncrl.core.variants import engine_facts


def choose_prefix_caching(config: Config) -> tuple[bool, str]:
    """Return what a replica's `rollout.prefix_caching` comes to, and why: `auto` is off where bits matter."""
    asked, engines = config.rollout.prefix_caching, [engine_facts(name) for name in config.rollout.engines]
    for engine in engines:
        if not engine.shares_prefixes:
            return False, f"{engine.title} shares no prefixes"
    if asked != "auto":
        return asked, "rollout.prefix_caching says so"
    mode = next(filter(None, (engine.find_deterministic_mode() for engine in engines)), "")
    exact = {
        "staleness.max_lag 0": config.staleness.max_lag == 0,
        "run.record": config.run.record,
        mode: bool(mode),
    }
    for cause in (cause for cause, is_set in exact.items() if is_set):
        return False, f"{cause}: last digits must not depend on earlier requests"
    return True, "rollout.prefix_caching auto, within one version"

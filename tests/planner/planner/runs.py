"""A small simulated run, and what it is made of."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import Config
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import Setting
from asyncrl.planner.simulation import Simulation
from configs import shipped

RATES = Rates(
    decode=((1.0, 100.0), (64.0, 1600.0)),
    step_s=0.2,
    step_s_per_token=1e-4,
    publish_s=0.01,
    transfer_s=0.05,
    swap_s=0.02,
)
SETTINGS = (
    "eval.every_steps=0",
    "rollout.group_size=4",
    "rollout.max_sequences=16",
    "rollout.max_tokens=256",
    "rollout.response_tokens=lognormal:1.0:40",
    "learner.groups_per_step=8",
)


@cache
def make_config(*settings: str) -> Config:
    return load_config(shipped()["quickstart"], [*SETTINGS, "rollout.replicas=2", *settings])


def make_setting(*settings: str, **changes: Any) -> Setting:
    return replace(Setting.of(make_config(*settings), prompt_tokens=6.0), **changes)


def run(setting: Setting, rates: Rates = RATES, steps: int = 24, seed: int = 0) -> Simulation:
    simulation = Simulation(setting, rates, seed, steps)
    simulation.run(until_s=3600.0)
    assert simulation.watch.is_over, "the run came to a standstill"
    return simulation


def rows_of(simulation: Simulation) -> list[dict[str, Any]]:
    """Return rows as the real learner writes them."""
    outcome, rates = simulation.outcome(), simulation.rates
    return [
        {
            "training/global_step": one.step + 1,
            "timing_s/step": one.step_s,
            "timing_s/wait": one.wait_s,
            "timing_s/update_weights": rates.publish_s,
            "timing_s/save_checkpoint": one.stall_s,
            "checkpoint/write_s": rates.checkpoint_write_s if one.stall_s else 0.0,
            "stream/parts": float(one.num_parts),
            "perf/total_num_tokens": one.num_tokens,
            "perf/rollout_idle_share": outcome.replica_idle,
            "staleness/trained_tokens": one.lags.total(),
            "staleness/masked_tokens": one.num_masked,
            "staleness/lag_mean": sum(lag * n for lag, n in one.lags.items()) / max(1, one.lags.total()),
            "weights/transfer_s": rates.transfer_s,
            "weights/apply_s": rates.swap_s,
            "response_length/mean": 60.0,
            "response_length/max": 250.0,
            "prompt_length/mean": 6.0,
            "perf/rollout_replicas": float(simulation.setting.replicas),
        }
        for one in simulation.watch.records[5:]
    ]

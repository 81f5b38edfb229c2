"""A run as its page sees it: a snapshot, a folder with metrics and a journal; and a hostile one."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from asyncrl.buffer.journals.segments import SegmentFolder
from asyncrl.core.config.tree import Config
from asyncrl.core.experience import Group, Trajectory, encode_group
from asyncrl.core.staleness import Span

WORDS = ("<pad>", "<s>", *"0123456789=", "</s>")
"""What the token ids stand for. A prompt is 5 1 9 3 7 =, its answers 1 3 5 7 9 and the end."""
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def make_config(folder: Path, journal: str = "file") -> Config:
    return Config(
        run={"name": "quickstart", "dir": str(folder.parent)},
        model={"path": str(folder / "model")},
        data={"train": "t"},
        reward={"fn": "gsm8k"},
        buffer={"journal": journal, **({"url": "managed"} if journal == "redis" else {})},
        learner={"steps": 600},
    )


def make_row(step: int) -> dict[str, Any]:
    wave = 0.02 * math.sin(step)
    return {
        "training/global_step": step,
        "critic/rewards/mean": 1 / (1 + math.exp(-(step - 120) / 40)) + wave,
        "actor/ppo_kl": 0.0004 + 0.0002 * math.sin(step / 3),
        "rollout_corr/kl": 0.0012 + 0.0004 * math.sin(step / 5),
        "actor/entropy": 1.6 * math.exp(-step / 120) + 0.05 + wave / 4,
        "staleness/lag_mean": 1.4 + 5 * wave,
        "staleness/lag_max_trained": 2.0 + (step % 3 == 0),
        "staleness/masked_share": 0.0,
        **{f"staleness/lag_share/{lag}": share for lag, share in enumerate((0.12, 0.44, 0.33, 0.11, 0.0))},
        "staleness/trained_tokens": 664.0,
        "staleness/masked_tokens": 0.0,
        "timing_s/step": 0.086,
        "perf/learner_tokens_per_s": 16897.0 + 4000 * wave,
        "perf/learner_idle_share": 0.31,
        "perf/rollout_tokens_per_s": 14020.0 + 90000 * wave,
        "perf/rollout_idle_share": 0.04,
        "perf/rollout_replicas": 2.0,
        "weights/version": float(step),
        "weights/published": float(step + 1),
        "weights/transfer_s": 0.0138,
        "weights/apply_s": 0.118,
        "weights/rounds_failed": 0.0,
        "training/epoch": 1.0,
    }


def make_snapshot(step: int = 231, name: str = "quickstart") -> dict[str, Any]:
    now = time.time()
    trained, dropped, reserved, stored, leased, issued = 16 * step, 7, 16, 11, 29, 3
    total = trained + dropped + reserved + stored + leased + issued
    kinds = ("weight_sync.0", "buffer.0", "publisher.0", "receiver.0", "receiver.1")
    services = {kind: _service("READY", 0.2) for kind in kinds}
    services["rollout.0"] = _service("READY", 0.1) | {"version": step + 1}
    services["rollout.1"] = _service("SYNCING", 0.4) | {"version": step - 1, "restarts": 1}
    services["learner.0"] = _service("READY", 0.2)
    return {
        "run": name,
        "run_id": "abcd1234",
        "folder": f"/runs/{name}",
        "state": "running",
        "health": "ok",
        "step": step,
        "steps": 600,
        "time_left_s": 734.0,
        "max_lag": 4,
        "ready_groups": 16,
        "resumed_step": 0,
        "torn": [],
        "metrics": make_row(step),
        "services": services,
        "error": None,
        "accuracy": 0.8125,
        "ledger": {
            "issued": total,
            "trained": trained,
            "dropped": {"stale": 5, "poison": 2},
            "pending": {"issued": issued, "leased": leased, "stored": stored, "reserved": reserved},
            "prompts_drawn": total - 5,
            "given_up": 2,
            "open": issued + leased + stored + reserved,
            "residue": 0,
            "stored_groups": stored,
            "journal": {"kind": "file", "is_away": False},
        },
        "bottleneck": {
            "who": "rollout",
            "why": "generation is slower than training: the learner idles 31 %, the replicas 4 %",
            "learner_waits_for": "rollout",
        },
        "events": [
            {"time": now - 190, "kind": "start", "service": "run", "text": "8 services were started"},
            {"time": now - 150, "kind": "ready", "service": "rollout.1", "text": "READY after 31 s"},
            {
                "time": now - 60,
                "kind": "guard",
                "service": "learner.0",
                "text": "kl_spike at step 188: 0.09 over 0.05",
            },
            {
                "time": now - 41,
                "kind": "exit",
                "service": "rollout.1",
                "text": "gone: the process died of signal 9",
            },
            {
                "time": now - 41,
                "kind": "restart",
                "service": "rollout.1",
                "text": "attempt 1 of 5, with receiver.1",
            },
            {"time": now - 9, "kind": "checkpoint", "service": "learner.0", "text": "step 200, 1.4 MB"},
        ],
    }


def _service(state: str, heartbeat_age_s: float) -> dict[str, Any]:
    return {
        "state": state,
        "version": None,
        "pid": 4711,
        "address": "ipc:///tmp/x",
        "gateway": None,
        "heartbeat_age_s": heartbeat_age_s,
        "restarts": 0,
    }


def write_rows(folder: Path, last_step: int = 231) -> None:
    rows: list[dict[str, Any]] = []
    for step in range(1, last_step + 1):
        rows.append({"time": 0.0, **make_row(step)})
        if step % 25 == 0:
            share = 1 / (1 + math.exp(-(step - 130) / 40))
            rows.append({"training/global_step": step, "val/id": step, "val-core/held_out/acc/mean@1": share})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_groups(folder: Path, num_groups: int = 8, words: Sequence[str] = WORDS) -> None:
    """Put groups into the run's file journal, and a tokenizer into the folder of its model."""
    (folder / "model").mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, words[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    segments = SegmentFolder(folder / "buffer" / "payloads")
    for ticket in range(1, num_groups + 1):
        segments.append(ticket, 1, encode_group(make_group(ticket)))
    segments.close()


def make_group(ticket: int) -> Group:
    answers = [make_answer(ticket, sample) for sample in range(8)]
    return Group(ticket, 1, np.array([7, 3, 11, 5, 9, 12], np.int32), tuple(answers))


def make_answer(ticket: int, sample: int) -> Trajectory:
    return Trajectory(
        np.array([3, 5, 7, 9, 11, 13], np.int32),
        np.ones(6, np.uint8),
        np.full(6, -0.2, np.float32),
        (Span(ticket + 1, 0, 3), Span(ticket + 2, 3, 6)),
        reward=float((ticket + sample) % 3 == 0),
        finish_reason="stop",
    )

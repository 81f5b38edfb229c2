"""Variants found by name: a journal is one file, an engine or a backend a folder, an estimator one record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.buffer.journals.kind import JournalKind, journal_kind
from asyncrl.core.config.load import load_config
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import (
    RewardFacts,
    backend_facts,
    backend_names,
    engine_facts,
    engine_names,
    estimators,
    estimators_needing,
    find_record,
    function,
    journal_facts,
    journal_names,
    rewards,
)
from asyncrl.planner.caveats import find_caveats
from asyncrl.planner.plan.names import check_rewards
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import Setting
from learner.backend import LearnerBackend, ValueBackend
from rollout_service.engine.protocol import EngineVariant, engine_variant
from rollout_service.evaluation.answers import choose_extract
from rollout_service.rewards.served.processes.pool_process import load_function
from tests.rollout.rewards.judging import answer

ROOT = Path(__file__).resolve().parents[3]
JOURNAL = """
from asyncrl.buffer.journals.kinds.none import MemoryJournal, NoneKind

class Kept(NoneKind):
    def open(self, section, run_dir, tell, runtime):
        (run_dir / "kept").write_text("by the new journal")
        return MemoryJournal()

KIND = Kept(keeps_past=True)
"""
USE_JOURNAL = """
import sys
from pathlib import Path
import asyncrl.buffer.journals.kinds as kinds
kinds.__path__.append(sys.argv[1])

from asyncrl.buffer.journals.kind import open_journal
from asyncrl.control.fleet.rules import make_rules
from asyncrl.core.config.load import load_config

folder = Path(sys.argv[2])
config = load_config(folder / "run.yaml")
assert config.buffer.journal == "kept"
open_journal(config.buffer, folder).close()
assert (folder / "kept").read_text() == "by the new journal"
assert not make_rules(config, 1).never_again, "its past outlives the buffer"
"""
ENGINE = """
from rollout_service.engine.protocol import EngineVariant
from rollout_service.engine.scripted.engine import ScriptedEngine

class Echo(EngineVariant):
    def build(self, config, tokenizer):
        return ScriptedEngine(tokenizer.eos_token_id)

VARIANT = Echo("echo", loads_model=False, tokens_per_s=7.0)
"""
USE_ENGINE = """
import sys
from pathlib import Path
from types import SimpleNamespace
import rollout_service.engine as engines
engines.__path__.append(sys.argv[1])

from asyncrl.core.config.load import load_config
from asyncrl.planner.calibration import base_rates
from rollout_service.engine.protocol import engine_variant

config = load_config(Path(sys.argv[2]) / "run.yaml")
assert config.rollout.engine == "echo"
assert base_rates(config).decode[0] == (1.0, 7.0)
engine = engine_variant("echo").build(config, SimpleNamespace(eos_token_id=3))
assert type(engine).__name__ == "ScriptedEngine"
try:
    load_config(Path(sys.argv[2]) / "agents.yaml")
except Exception as error:
    assert "echo has no gateway" in str(error), error
else:
    raise SystemExit("the record says that it has no gateway")
"""
BACKEND = """
from asyncrl.core.variants import BackendFacts

VARIANT = BackendFacts("learner.mine:Policy", "learner.mine:Value", lacks=("tp", "compile"))
"""
USE_BACKEND = """
import sys
from pathlib import Path
import learner
learner.__path__.append(sys.argv[1])

from asyncrl.core.config.load import load_config
from learner.backend import Placement
from learner.composition import open_critic, open_policy

folder = Path(sys.argv[2])
config = load_config(folder / "run.yaml")
place = Placement()
assert open_policy(config, place).seed == open_critic(config, place).seed == config.run.seed
try:
    load_config(folder / "wide.yaml")
except Exception as error:
    assert "learner.backend: mine has no learner.tp: 2" in str(error), error
    assert "Backends that have it: megatron" in str(error), error
else:
    raise SystemExit("the record says that it has no tensor parallelism")
"""
USE_ESTIMATOR = """
import sys
from pathlib import Path
from asyncrl.core.variants import VALUES, Estimator, estimators
from learner.algorithms import variants
variants.ADVANTAGES["mine"] = Estimator(
    "mine:advantage", needs=frozenset({VALUES}), batch_wide="looks at all of it"
)
sys.path.insert(0, sys.argv[1])

from asyncrl.core.config.conflicts import WITH_VALUES
from asyncrl.core.config.rules.streaming import BATCH_WIDE
from asyncrl.core.config.load import load_config
from learner.algorithms.advantage import ADVANTAGES
from learner.algorithms.validation import find_problems

assert "mine" in WITH_VALUES and BATCH_WIDE["mine"] == "looks at all of it"
assert ADVANTAGES["mine"](None) == "computed"
config = load_config(Path(sys.argv[2]) / "run.yaml")
assert not [one for one in find_problems(config.algorithm) if "mine" in one and "not" in one]
"""


def run(script: str, *folders: Path) -> None:
    """Run a script in a process of its own: names are read when the configuration is imported."""
    command = [sys.executable, "-c", script, *map(str, folders)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def write_run(folder: Path, text: str, name: str = "run.yaml") -> None:
    (folder / name).write_text(
        f"run: {{name: any}}\nmodel: {{path: builtin:digits-small}}\ndata: {{train: any.jsonl}}\n"
        f"reward: {{fn: exact_match}}\n{text}"
    )


def test_a_new_journal_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "kinds").mkdir()
    (tmp_path / "kinds" / "kept.py").write_text(JOURNAL)
    write_run(tmp_path, "buffer: {journal: kept}")
    run(USE_JOURNAL, tmp_path / "kinds", tmp_path)
    with pytest.raises(ConfigError, match="kept"):
        load_config(tmp_path / "run.yaml")


def test_a_new_engine_is_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "engines" / "echo"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "variant.py").write_text(ENGINE)
    write_run(tmp_path, "rollout: {engine: echo}")
    write_run(tmp_path, "rollout: {engine: echo, gateway: {port: 0}}", "agents.yaml")
    run(USE_ENGINE, tmp_path / "engines", tmp_path)


def test_a_new_learner_backend_is_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "backends" / "mine"
    folder.mkdir(parents=True)
    body = "def __init__(self, *_, seed, **__):\n        self.seed = seed\n"
    (folder / "__init__.py").write_text("".join(f"class {name}:\n    {body}" for name in ("Policy", "Value")))
    (folder / "variant.py").write_text(BACKEND)
    write_run(
        tmp_path,
        "learner: {backend: mine}\ncritic: {path: builtin:digits-small}\nalgorithm: {advantage: gae}",
    )
    write_run(tmp_path, "learner: {backend: mine, tp: 2}", "wide.yaml")
    run(USE_BACKEND, tmp_path / "backends", tmp_path)


def test_a_new_estimator_is_one_file_and_its_record(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def advantage(x):\n    return 'computed'\n")
    write_run(tmp_path, "algorithm: {advantage: mine}\ncritic: {path: builtin:digits-small}")
    run(USE_ESTIMATOR, tmp_path, tmp_path)


def length(response: str, *_: object, **extra: object) -> float:
    return float(len(response))


def last_letter(response: str) -> str:
    return response[-1:]


def test_a_new_reward_is_one_function_and_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = RewardFacts(f"{__name__}:length", is_pooled=True, answer=f"{__name__}:last_letter")
    monkeypatch.setitem(rewards(), "mine", mine)
    write_run(tmp_path, "")
    config = load_config(tmp_path / "run.yaml", ["reward.fn=mine"])
    assert not list(check_rewards(config))
    caveats = find_caveats(config, Setting.of(config), Rates(source="a run"), 10)
    assert any(line.startswith("reward.fn mine: ") for line in caveats)
    assert choose_extract(["mine"])("abc") == "c"
    assert load_function("mine", mine.function, {})(answer("abc")).value == 3.0


@pytest.mark.parametrize("name", journal_names())
def test_each_journal_has_a_kind(name: str) -> None:
    assert isinstance(journal_kind(name), JournalKind)
    assert journal_kind(name) is journal_facts(name)


@pytest.mark.parametrize("name", engine_names())
def test_each_engine_has_a_variant(name: str) -> None:
    assert isinstance(engine_variant(name), EngineVariant)
    assert engine_variant(name) is engine_facts(name)


@pytest.mark.parametrize("name", backend_names())
def test_the_classes_of_a_backend_s_record_are_what_the_learner_opens(name: str) -> None:
    facts = backend_facts(name)
    for place, contract in ((facts.policy, LearnerBackend), (facts.value, ValueBackend)):
        assert not {one for one in dir(contract) if one[0] != "_"} - set(dir(function(place)))


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("fsdp2", "tp: 2"),
        ("fsdp2", "pp: 2"),
        ("fsdp2", "pp: 2, vpp: 2"),
        ("fsdp2", "cp: 2"),
        ("fsdp2", "overlap: true"),
        ("fsdp2", "recompute: selective"),
        ("megatron", "compile: true"),
    ],
)
def test_an_option_that_does_nothing_with_a_backend_is_refused_with_it_alone(
    tmp_path: Path, backend: str, options: str
) -> None:
    option = options.rpartition(", ")[2]
    write_run(tmp_path, f"learner: {{backend: {backend}, {options}}}")
    with pytest.raises(ConfigError, match=f"learner.backend: {backend} has no learner.{option}"):
        load_config(tmp_path / "run.yaml")
    other = next(name for name in backend_names() if name != backend)
    write_run(tmp_path, f"learner: {{backend: {other}, {options}}}")
    load_config(tmp_path / "run.yaml")


def test_recomputing_in_full_is_for_every_backend(tmp_path: Path) -> None:
    for name in backend_names():
        write_run(tmp_path, f"learner: {{backend: {name}, recompute: full}}")
        load_config(tmp_path / "run.yaml")


def test_a_module_whose_record_is_of_another_kind_is_named() -> None:
    with pytest.raises(TypeError, match=r"conflicts\.CONFLICT is a str, not a Estimator"):
        find_record("asyncrl.core.config.conflicts", "CONFLICT", type(estimators()["grpo"]))


def test_records_are_read_without_what_they_stand_for() -> None:
    code = (
        "import sys; from asyncrl.core import variants as v; v.estimators(), v.losses();"
        "[v.journal_facts(name) for name in v.journal_names()];"
        "[v.engine_facts(name) for name in v.engine_names()];"
        "print(sorted({'torch', 'vllm', 'redis', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
    assert estimators_needing("values")

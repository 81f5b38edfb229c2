"""The table of metrics: complete, consistent, and the page made of it current."""

import ast
import logging
import re
from pathlib import Path

from asyncrl.control.rows.metering import Meter, evaluation_row
from asyncrl.control.rows.recorder import Recorder
from asyncrl.core.config.tree import Config
from asyncrl.core.metrics import METRICS, extreme_of, find, unknown_names
from asyncrl.core.metrics.page import render
from asyncrl.core.metrics.tallies import conclude
from asyncrl.core.status.service import FinishedEvaluation
from asyncrl.core.status.statuses import Statuses
from rollout_service.evaluation.statistics import Judged, JudgedPrompt, tally_prompts
from tests.threads import RUNTIME

ROOT = Path(__file__).parents[3]
PACKAGES = ("asyncrl", "benchmarks", "learner", "rollout_service", "weight_sync")
FAMILIES = {metric.name.partition("/")[0] for metric in METRICS}
VERL_NAMES = """
actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy actor/entropy_loss
actor/kl_loss actor/kl_coef actor/reward_kl_penalty actor/reward_kl_penalty_coeff actor/grad_norm actor/lr
actor/loss critic/vf_loss critic/vf_clipfrac critic/vpred_mean critic/grad_norm critic/lr critic/loss
critic/vf_explained_var response_length/clip_ratio response/aborted_ratio prompt_length/clip_ratio
perf/total_num_tokens perf/time_per_step response_length_non_aborted/clip_ratio perf/throughput
perf/mfu/actor perf/mfu/critic perf/mfu/actor_infer perf/max_memory_allocated_gb perf/max_memory_reserved_gb
perf/cpu_memory_used_gb timing_s/step timing_s/update_actor timing_per_token_ms/update_actor
training/global_step training/epoch training/rollout_probs_diff_valid training/rollout_probs_diff_max
training/rollout_probs_diff_mean training/rollout_probs_diff_std training/rollout_actor_probs_pearson_corr
rollout_corr/rollout_is_eff_sample_size rollout_corr/chi2_seq
rollout_corr/rollout_rs_seq_mean_k1_masked_fraction rollout_corr/rollout_rs_seq_masked_fraction
val-core/gsm8k/acc/mean@1 val-core/gsm8k/acc/best@8/mean variance_proxy/proxy3_pure_noise
"""
OLDER = {"training/is_first_of_life"}
"""Names in the rows of an older asyncrl, which are read."""
SPREADS = """
critic/score critic/rewards critic/advantages critic/returns critic/values response_length prompt_length
num_turns response_length_non_aborted training/off_policy/trajectory_spans
training/off_policy/trajectory_staleness training/off_policy/trajectory_staleness_worst
"""


def verl_names():
    yield from VERL_NAMES.split()
    for name in SPREADS.split():
        yield from (f"{name}/mean", f"{name}/max", f"{name}/min")
    for part in ("min", "max", "minmax_diff", "balanced_min", "balanced_max", "mean"):
        yield f"global_seqlen/{part}"


def names_in_code():
    """Yield every string of the code that looks like a metric's name, with where it stands."""
    looks_like_one = re.compile(rf"(?:{'|'.join(sorted(FAMILIES))})/[\w@./-]+")
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        within = {id(part) for node in formatted for part in ast.walk(node)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in within and looks_like_one.fullmatch(node.value):
                yield node.value, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_name_of_verl_is_in_the_table():
    assert unknown_names(verl_names()) == {}


def test_every_name_in_the_code_is_in_the_table():
    bases = {metric.name.rpartition("/")[0] for metric in METRICS}
    found = dict(names_in_code())
    assert len(found) > 100
    unknown = {name: where for name, where in found.items() if find(name) is None and name not in OLDER}
    assert {name: where for name, where in unknown.items() if name.rstrip("/") not in bases} == {}


def test_what_the_supervisor_and_evaluations_add_is_in_the_table():
    judged = JudgedPrompt("openai/gsm8k", (Judged(True, 1.0, "1", 3, False), None, None, None))
    results = conclude(tally_prompts([judged, judged], 4, {"openai/gsm8k": "openai/gsm8k"}))
    evaluation = evaluation_row(FinishedEvaluation(1, 2, 3, results))
    assert "val-core/openai/gsm8k/acc/maj@4/low" in evaluation
    assert unknown_names([*Meter().update(0.0, Statuses()), *evaluation]) == {}


def test_names_are_unique_and_said_in_full():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.unit
        assert metric.meaning[0].isupper() or metric.meaning[0] in "1(", metric
        assert (metric.reduction == "mean") == (metric.over != "-"), metric


def test_a_variable_part_stands_for_what_it_says_and_nothing_else():
    assert find("timing_s/reward").name == "timing_s/<stage>"
    assert find("timing_s/step").name == "timing_s/step"
    assert find("timing_s/a/b") is None
    assert find("rollout_corr/rollout_rs_token_k2_mean") is not None
    assert find("rollout_corr/rollout_rs_token_k4_mean") is None
    assert find("rollout_corr/rollout_rs_seq_max_k3_seq_max").reduction == "max"


def test_a_metric_is_reduced_by_its_meaning_where_the_words_of_its_name_mislead():
    assert extreme_of("rollout_corr/rollout_rs_seq_max_k2_mean") is None
    assert extreme_of("rollout_corr/rollout_rs_seq_max_k2_min") == "min"
    assert extreme_of("mine/value_max") == "max"
    assert extreme_of("mine/maximal") is None


def test_words_and_reduction_agree_in_every_name_without_a_variable_part():
    for metric in METRICS:
        words = metric.name.rpartition("/")[2].split("_")
        named = "max" if "max" in words else "min" if "min" in words else "neither"
        is_plain = "<" not in metric.name and metric.reduction != "leader" and "valid" not in words
        if is_plain:
            assert (metric.reduction if metric.reduction in ("max", "min") else "neither") == named, metric


def test_an_unknown_name_is_told_with_the_most_similar_one():
    found = unknown_names(["actor/grad_nrom", "time", "actor/lr", "zzz/qqq"])
    assert found == {"actor/grad_nrom": "actor/grad_norm", "zzz/qqq": ""}


def test_the_recorder_records_an_unknown_name_and_says_so_once(tmp_path, caplog):
    recorder = Recorder(tmp_path / "metrics.jsonl", RUNTIME)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            recorder.record({"training/global_step": step, "actor/grad_nrom": 1.0, "actor/lr": 1.0})
    recorder.close()
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1
    assert "actor/grad_nrom" in warned[0]
    assert "actor/grad_norm" in warned[0]
    assert (tmp_path / "metrics.jsonl").read_text().count("actor/grad_nrom") == 2


def test_the_page_of_metrics_is_current():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == render(), "run: python -m asyncrl.core.metrics > docs/metrics.md"


def rows_of_from_verl():
    """Yield (verl's cell, our cell) of every row of the tables in docs/from-verl.md."""
    for line in (ROOT / "docs" / "from-verl.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and not cells[0].startswith(("verl", "---")):
            yield cells[0], cells[1]


def config_keys(model, prefix=""):
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if hasattr(field.annotation, "model_fields"):
            yield from config_keys(field.annotation, f"{prefix}{name}.")


def test_what_the_page_for_users_of_verl_names_exists_here():
    keys = set(config_keys(Config))
    rows = list(rows_of_from_verl())
    assert len(rows) > 100
    ours = [name for _, cell in rows for name in re.findall(r"`([\w.@/<>-]+)`", cell)]
    unknown = [name for name in ours if (find(name) is None if "/" in name else name not in keys)]
    assert unknown == []


def test_every_key_of_the_learning_sections_has_its_place_on_the_page_for_users_of_verl():
    text = (ROOT / "docs" / "from-verl.md").read_text(encoding="utf-8")
    sections = ("algorithm.", "critic.", "learner.", "rollout.", "weight_sync.", "data.", "metrics.")
    keys = [key for key in config_keys(Config) if key.startswith(sections)]
    assert [key for key in keys if f"`{key}`" not in text] == []
    assert [name for name in ("publish_s", "apply_s", "version") if f"`weights/{name}`" not in text] == []

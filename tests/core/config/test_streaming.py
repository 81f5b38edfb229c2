"""`learner.stream` is refused, with the reason, where a step needs its whole batch before its end."""

from __future__ import annotations

import pytest

from asyncrl.core.config.load import load_config
from asyncrl.core.config.reading.problems import ConfigProblems

GOOD = "model: {path: m}\ndata: {train: t}\nreward: {fn: f}\nlearner: {stream: true}\n"

REFUSED = [
    (
        "learner.minibatches=2",
        "which are cut from the whole batch in ticket order and each update the weights",
    ),
    ("learner.overlap=true", "learner.overlap: true, which sends gradients before the parts to come are in"),
    ("learner.router_aux_loss=0.1", "learner.router_aux_loss: 0.1, which has another divisor"),
    ("learner.router_z_loss=0.1", "learner.router_z_loss: 0.1, which has another divisor"),
    ("model.dtype=float16", "whose gradients overflow before they are divided"),
    ("algorithm.advantage=gdpo", "which whitens them over the whole batch"),
    ("algorithm.advantage=gpg", "which scales them by the share of the whole batch's answers that scored"),
    ("algorithm.advantage=reinforce_plus_plus", "which whitens"),
    ("algorithm.advantage=reinforce_plus_plus_baseline", "which whitens"),
    ("algorithm.advantage=gae", "has a critic, which is trained on the whole batch before the policy"),
    ("algorithm.advantage=vtrace", "which has a critic"),
    ("algorithm.advantage=mine.py:mine", "which may need the whole batch"),
    ("algorithm.correction=mine.py:mine", "which may need the whole batch"),
    ("algorithm.normalize_weights=true", "which divides by the mean weight of the whole batch"),
    ("algorithm.loss=clip_cov", "which picks tokens of a microbatch"),
    ("algorithm.loss=kl_cov", "which picks tokens of a microbatch"),
    ("algorithm.loss=m2po", "which picks tokens of a microbatch"),
    ("algorithm.loss=mine.py:mine", "whose divisor is not known"),
]


@pytest.fixture
def read(tmp_path):
    def read_text(*overrides):
        (tmp_path / "a.yaml").write_text(GOOD)
        gpus = ("rollout.gpus=1", "learner.gpus=1", "learner.dp=1")
        return load_config(tmp_path / "a.yaml", [*gpus, *overrides])

    return read_text


@pytest.mark.parametrize(("override", "why"), REFUSED)
def test_what_needs_the_whole_batch_is_refused_with_the_reason(read, override, why):
    with pytest.raises(ConfigProblems) as caught:
        read(override)
    (problem,) = caught.value.problems
    key = override.partition("=")[0]
    assert problem.what.startswith(f"learner.stream does not go with {key}: ") and why in problem.what
    assert problem.hint == f"Leave learner.stream out, or choose another {key}"
    assert problem.where.endswith("a.yaml:4:19")
    read(override, "learner.stream=false")


@pytest.mark.parametrize(
    "overrides",
    [
        ("staleness.policy=wait",),
        ("staleness.policy=drop", "learner.dp=4", "learner.tp=2", "learner.backend=megatron"),
        ("algorithm.loss=sapo",),
        ("algorithm.loss=sapo", "algorithm.entropy_coeff=0.1", "algorithm.aggregation=seq-mean-token-mean"),
        ("algorithm.kl.coef=0.1", "algorithm.kl.where=reward"),
        ("algorithm.advantage=rloo", "algorithm.loss=gspo", "algorithm.correction=bypass_pg_is"),
    ],
)
def test_what_a_group_alone_decides_is_streamed(read, overrides):
    assert read(*overrides).learner.stream


@pytest.mark.parametrize("term", ["algorithm.entropy_coeff=0.1", "algorithm.kl.coef=0.1"])
@pytest.mark.parametrize("loss", ["sapo", "geo_mean"])
def test_terms_that_divide_by_something_else_are_refused(read, loss, term):
    with pytest.raises(
        ConfigProblems, match="a mean over rows beside an entropy or KL term that is a token-m"
    ):
        read(f"algorithm.loss={loss}", term)

"""PPO's models in a real step: the policy, a critic that learns values, a frozen reference."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.core.config.tree import AdaptiveKlSection, KlSection, LearnerSection
from asyncrl.core.errors import ConfigError
from asyncrl.core.metrics import unknown_names
from learner.backend import Models, Placement
from learner.megatron.backend import MegatronBackend, MegatronValueBackend
from tests.learner.parts.samples import make_groups, save_model
from tests.learner.parts.training import open_backend, open_objective, take_step

KL = KlSection(
    coef=0.05, where="reward", estimator="k1", adaptive=AdaptiveKlSection(target=0.01, horizon=100)
)
GROUPS = make_groups(4, versions=(1, 2))


@pytest.fixture
def models(tmp_path):
    folder = save_model(tmp_path)
    policy = open_backend(folder)
    section = LearnerSection(lr=1e-2, minibatches=2)
    critic = MegatronValueBackend(folder, section, Placement(), dtype="float32")
    reference = MegatronBackend(folder, section, Placement(), dtype="float32", is_frozen=True)
    models = Models(policy, critic, reference)
    yield models
    models.close()


def train(models: Models, objective, num_steps: int) -> list[dict[str, float]]:
    return [take_step(models, objective, GROUPS) for _ in range(num_steps)]


def test_the_critic_learns_the_returns_that_it_is_shown(models):
    rows = train(models, open_objective(advantage="gae", gamma=1.0, lam=1.0, value_clip=10.0), 12)
    assert rows[-1]["critic/vf_loss"] < 0.5 * rows[0]["critic/vf_loss"]
    assert rows[-1]["critic/vf_explained_var"] > rows[0]["critic/vf_explained_var"]
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_every_metric_of_a_step_with_all_models_is_registered(models):
    row = train(models, open_objective(advantage="gae", kl=KL), 1)[0]
    assert unknown_names(row) == {}
    assert {"critic/vf_loss", "critic/grad_norm", "critic/values/mean", "actor/reward_kl_penalty"} <= set(row)


def test_the_reference_stays_while_the_policy_moves_away_from_it(models):
    rows = train(models, open_objective(advantage="gae", kl=KL), 4)
    assert rows[0]["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1]["actor/reward_kl_penalty"] != pytest.approx(0.0, abs=1e-4)


def test_an_adaptive_coefficient_follows_the_divergence(models):
    objective = open_objective(kl=KL)
    before = objective.read_controllers()["kl_coef"]
    objective.update_controllers({"actor/reward_kl_penalty": 1.0}, num_rows=16)
    assert objective.read_controllers()["kl_coef"] > before


def test_a_critic_resumes_bit_by_bit_beside_its_policy(models, tmp_path):
    objective = open_objective(advantage="gae")
    train(models, objective, 1)
    models.policy.save_state(tmp_path / "state")
    models.critic.save_state(tmp_path / "state" / "critic")
    straight = train(models, objective, 1)
    wanted = {name: tensor.clone() for name, tensor in models.critic.named_tensors()}
    models.policy.load_state(tmp_path / "state")
    models.critic.load_state(tmp_path / "state" / "critic")
    assert train(models, objective, 1) == straight
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in models.critic.named_tensors())


def test_an_advantage_that_needs_values_is_refused_without_a_critic(models):
    with pytest.raises(ConfigError, match="needs the values of a critic"):
        train(Models(models.policy), open_objective(advantage="gae"), 1)

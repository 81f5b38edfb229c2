import pickle

import pytest

from asyncrl.core.config.explain import keys_of
from asyncrl.core.config.load import dump_resolved, load, load_config
from asyncrl.core.config.reading.problems import ConfigProblems, Problem
from asyncrl.core.config.rules.refusals import MOVED, NO_ADAPTER, NOT_THERE
from asyncrl.core.errors import ConfigError
from configs import shipped

GOOD = """\
model: {path: folder}
data: {train: prompts.parquet}
reward: {fn: gsm8k}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(text):
        (tmp_path / "a.yaml").write_text(text)
        return "a.yaml"

    return write_file


def problems_of(path, overrides=()):
    with pytest.raises(ConfigProblems) as caught:
        load_config(path, overrides)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_configuration_loads(name):
    assert load_config(shipped()[name]).run.name == name


def test_quickstart_is_short_enough_to_be_read():
    assert len(shipped()["quickstart"].read_text().splitlines()) <= 40


@pytest.mark.parametrize("name", shipped())
def test_the_resolved_form_reads_back_equal(name, write):
    config = load_config(shipped()[name])
    assert load_config(write(dump_resolved(config))) == config


def test_the_resolved_form_shows_defaults_in_the_tree_s_order(write):
    text = dump_resolved(load_config(write(GOOD)))
    assert "max_lag: 4\n" in text
    assert text.index("run:") < text.index("model:") < text.index("launcher:")


def test_an_exponent_without_a_point_is_a_number(write):
    assert load_config(write(GOOD + "learner: {lr: 1e-6}\n")).learner.lr == 1e-6


def test_an_adaptive_kl_without_numbers_has_its_defaults(write):
    kl = load_config(write(GOOD + "algorithm: {kl: {coef: 0.1, adaptive: {}}}\n")).algorithm.kl
    assert kl.adaptive is not None and (kl.adaptive.target, kl.adaptive.horizon) == (0.1, 10_000.0)


def test_a_misspelt_order_of_the_prompts_is_not_taken_for_a_field_of_the_rows(write):
    def order(word):
        return load_config(write(GOOD), [f"data.order={word}"]).data

    for word, is_shuffled, curriculum in (
        ("shuffled", True, None),
        ("sequential", False, None),
        ("sequence", True, "sequence"),
        ("extra_info.level", True, "extra_info.level"),
    ):
        assert (order(word).is_shuffled, order(word).curriculum) == (is_shuffled, curriculum)
    (problem,) = problems_of(write(GOOD), ["data.order=shuffle"])
    assert "data.order is 'shuffle', but must be shuffled, sequential, a row's field, or file.py" in problem
    assert problem.endswith("Did you mean 'shuffled'?")


def test_a_section_whose_keys_are_all_commented_out_has_its_defaults(write):
    assert load_config(write(GOOD + "rollout:\n  # replicas: 3\n")).rollout.replicas.start == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "learner:\n  group_per_step: 16\n",
            "a.yaml:5:3: unknown key 'group_per_step' in 'learner'. Did you mean 'groups_per_step'?",
        ),
        (
            "rollout:\n  groups_per_step: 16\n",
            "a.yaml:5:3: unknown key 'groups_per_step' in 'rollout'. It belongs to the section 'learner'",
        ),
        ("rolout: {}\n", "a.yaml:4:1: unknown section 'rolout'. Did you mean 'rollout'?"),
        ("learner: {lr: fast}\n", "a.yaml:4:15: learner.lr is 'fast', but must be a number"),
        (
            'learner: {steps: "3"}\n',
            "a.yaml:4:18: learner.steps is '3', but must be a whole number. Write it without quotes",
        ),
        (
            "learner: {steps: 1e3}\n",
            "a.yaml:4:18: learner.steps is 1000.0, but must be a whole number. Write 1000",
        ),
        ("learner: {lr: .nan}\n", "a.yaml:4:15: learner.lr is NaN, but must be a finite number"),
        *[
            (f"learner: {{lr: {word}}}\n", f"a.yaml:4:15: learner.lr is '{word}', but must be a number\n")
            for word in ("nan", "inf")
        ],
        (
            "rollout: {temperature: 2.5}\n",
            "a.yaml:4:24: rollout.temperature is 2.5, but must be 2.0 or less",
        ),
        ("eval: {temperature: 3}\n", "a.yaml:4:21: eval.temperature is 3, but must be 2.0 or less"),
        *[
            (
                f"launcher: {{host: {host}}}\n",
                f"a.yaml:4:18: launcher.host is '{host}', but must be the IPv4 address of one interface",
            )
            for host in ("localhost", "0.0.0.0")
        ],
        ("learner: 3\n", "a.yaml:4:10: learner is 3, but must be a section of keys and values"),
        (f"run: {{seed: {2**63}}}\n", f"a.yaml:4:13: run.seed is {2**63}, but must be less than {2**63}"),
        ("learner: {steps: 0}\n", "a.yaml:4:18: learner.steps is 0, but must be 1 or more"),
        ("run: {name: 12}\n", 'a.yaml:4:13: run.name is 12, but must be text. Write it in quotes: "12"'),
        (
            "metrics: {tensorboard: yes}\n",
            "a.yaml:4:24: metrics.tensorboard is 'yes', but must be true or false. Write true",
        ),
        (
            "buffer: {journal: fil}\n",
            "a.yaml:4:19: buffer.journal is 'fil', but must be one of 'file', 'none' or 'redis'. Did you",
        ),
        (
            "rollout: {top_p: 0.9}\n",
            (
                "a.yaml:4:11: unknown key 'top_p' in 'rollout'. Leave it out: answers are sampled with the "
                "temperature alone. The learner weighs each token by its log-prob under the whole vocabulary"
            ),
        ),
        *[
            (
                f"rollout: {{{name}: 1}}\n",
                f"unknown key '{name}' in 'rollout'. Leave it out: answers are sampled",
            )
            for name in (
                "top_k",
                "min_p",
                "repetition_penalty",
                "logit_bias",
                "presence_penalty",
                "min_tokens",
            )
        ],
        (
            "learner: {backend: deepspeed}\n",
            (
                "a.yaml:4:20: learner.backend is 'deepspeed', but must be one of 'fsdp2' or 'megatron'. "
                "There is no adapter for DeepSpeed: megatron cuts large models"
            ),
        ),
        (
            "learner: {lr_schedule: cosine:2}\n",
            (
                "a.yaml:4:24: learner.lr_schedule is 'cosine:2', but must be constant, cosine, or "
                "cosine:<ratio from 0 to 1>. cosine:0.1 ends at a tenth of learner.lr"
            ),
        ),
        (
            "learner: {lr_schedule: 1}\n",
            'a.yaml:4:24: learner.lr_schedule is 1, but must be text. Write it in quotes: "1"',
        ),
        (
            "buffer: {url: http://h}\n",
            (
                "a.yaml:4:15: buffer.url is 'http://h', but must be a Redis URL, ${NAME}, or managed. "
                "Write redis://user:${PASSWORD}@host:6379/0"
            ),
        ),
        (
            "algorithm: {kl: {coef: 0.1, adaptive: {targt: 1}}}\n",
            "a.yaml:4:40: unknown key 'targt' in 'algorithm.kl.adaptive'. Did you mean 'target'?",
        ),
        (
            "guard: {limits: {actor/entropy: {mx: 1}}}\n",
            "a.yaml:4:34: unknown key 'mx' in 'guard.limits.actor/entropy'. Did you mean 'max'?",
        ),
        ("algorithm: {clip: [0.2]}\n", "a.yaml:4:19: algorithm.clip has too few items. It takes two"),
        ("algorithm: {clip: [0.2, x]}\n", "a.yaml:4:25: algorithm.clip.1 is 'x', but must be a number"),
        ("learner: {betas: [0.9, 1.0]}\n", "a.yaml:4:24: learner.betas.1 is 1.0, but must be less than 1"),
        (
            "learner:\n  lr: 1\n  tp: 1\n  lr: 2\n",
            "a.yaml:7:3: the key 'lr' stands here for the second time (first in line 5)",
        ),
        (
            "run: {name: !!python/name:os.system x}\n",
            "a.yaml:4:13: the tag 'tag:yaml.org,2002:python/name:os.system'",
        ),
        ("a: &a [*a]\n", "a.yaml:4:4: values are nested deeper than 8 levels"),
        ("? [1, 2]\n: 3\n", "a.yaml:4:3: a key must be a word"),
    ],
)
def test_a_problem_names_its_place_the_value_and_what_to_write(write, text, problem):
    assert problem in "".join(f"{one}\n" for one in problems_of(write(GOOD + text)))


@pytest.mark.parametrize("key", MOVED)
def test_a_key_of_another_version_is_refused_with_the_form_that_stands_for_it(write, key):
    section, _, name = key.rpartition(".")
    assert name not in keys_of(tuple(section.split(".")))
    (problem,) = problems_of(write(GOOD), [f"{key}=1"])
    assert problem == f"--set {key}=1: unknown key '{name}' in '{section}'. {MOVED[key]}"


@pytest.mark.parametrize("key", NOT_THERE)
def test_a_key_of_what_is_not_there_is_refused_with_the_reason_wherever_it_stands(write, key):
    what, why = NOT_THERE[key]
    for place, prefix in ((f"{key}: {{rank: 8}}\n", "4:1: "), (f"learner: {{{key}: 8}}\n", "4:11: learner.")):
        (problem,) = problems_of(write(GOOD + place))
        assert problem == f"a.yaml:{prefix}{key}: {what}. {why}"
    assert not any(key in keys_of((section,)) for section in keys_of(()))


@pytest.mark.parametrize(("key", "value"), NO_ADAPTER)
def test_a_value_of_what_is_not_there_is_refused_with_the_reason(write, key, value):
    (problem,) = problems_of(write(GOOD), [f"{key}={value}"])
    assert "but must be one of" in problem and problem.endswith(NO_ADAPTER[key, value])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "a:\n\tb: 1\n",
            "a.yaml:2:1: this is not YAML: found character '\\t' that cannot start any token. Indent with",
        ),
        ("a: [1, 2\nb: 3\n", "a.yaml:2:2: this is not YAML: expected ',' or ']', but got ':'"),
        ("a: 1\n---\nb: 1\n", "a.yaml:2:1: this is not YAML: but found another document"),
        ("a: b: c\n", "a.yaml:1:5: this is not YAML: mapping values are not allowed here"),
        ("a: \x07\n", "a.yaml:1:1: this is not YAML"),
        ("", "a.yaml:1:1: the file is empty"),
        ("# nothing\n", "a.yaml:1:1: the file is empty"),
        ("- 1\n", "a.yaml:1:1: the file must hold sections of keys and values"),
    ],
)
def test_what_is_no_tree_is_one_problem(write, text, problem):
    found = problems_of(write(text))
    assert len(found) == 1
    assert found[0].startswith(problem)


def test_all_problems_come_at_once_in_the_order_of_the_file(write):
    text = """\
model: {dtype: float33}
data:
learner:
  lr: fast
  minibatches: 3
weight_sync: {backend: nccl}
eval: {every_steps: 5}
"""
    assert [line.split(". ")[0] for line in problems_of(write(text))] == [
        "a.yaml:1:1: model.path is missing",
        "a.yaml:1:1: the section 'reward' is missing",
        "a.yaml:1:16: model.dtype is 'float33', but must be one of 'float32', 'bfloat16' or 'float16'",
        "a.yaml:2:1: data.train is missing",
        "a.yaml:4:7: learner.lr is 'fast', but must be a number",
        "a.yaml:5:16: learner.groups_per_step (16) must be a multiple of learner.minibatches (3)",
        "a.yaml:6:24: weight_sync.backend: nccl is not there: publisher and receivers have no GPU",
        "a.yaml:7:21: eval.every_steps is set, but data.eval names no prompts",
    ]


def test_a_wrong_value_is_not_reported_again_as_a_conflict(write):
    assert problems_of(write(GOOD + "learner: {minibatches: x, groups_per_step: 7}\n")) == [
        "a.yaml:4:24: learner.minibatches is 'x', but must be a whole number"
    ]


def test_a_wrong_value_that_was_set_aside_does_not_seem_missing(write):
    text = GOOD.replace("parquet}", "parquet, eval: 3}") + "eval: {every_steps: 5}\n"
    assert len(problems_of(write(text))) == 1


def test_an_override_s_items_do_not_point_at_the_file_s(write):
    (problem,) = problems_of(write(GOOD + "learner: {betas: [0.9, 0.9]}\n"), ["learner.betas=[0.9, 7]"])
    assert problem.startswith("--set learner.betas=[0.9, 7]: learner.betas.1 is 7")


def test_an_override_below_what_is_no_section_leaves_the_problem_where_it_stands(write):
    (problem,) = problems_of(write(GOOD + "learner: 3\n"), ["learner.lr=1.0"])
    assert problem.startswith("a.yaml:4:10: learner is 3, but must be a section")


def test_an_override_replaces_a_value_and_mends_a_wrong_one(write):
    path = write(GOOD + "learner: {lr: fast, betas: [0.9, 7]}\n")
    config = load_config(
        path, ["learner.lr=1e-5", "learner.betas=[0.8, 0.9]", "rollout.replicas=3", "data.eval="]
    )
    assert config.learner.lr == 1e-5
    assert config.learner.betas == (0.8, 0.9)
    assert config.rollout.replicas.start == 3
    assert config.data.eval is None


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "learner.lr",
            "--set learner.lr: an option has the form key=value. For example: --set learner.steps=10",
        ),
        (".lr=3", "--set .lr=3: an option has the form key=value"),
        ("learner.lrr=3", "--set learner.lrr=3: unknown key 'lrr' in 'learner'. Did you mean 'lr'?"),
        ("learner.lr=x", "--set learner.lr=x: learner.lr is 'x', but must be a number"),
        ("learner.lr=[1", "--set learner.lr=[1: this is not YAML"),
        ("learner.lr.x=1", '--set learner.lr.x=1: learner.lr is {"x": 1}, but must be a number'),
        ("nope.lr=1", "--set nope.lr=1: unknown section 'nope'"),
        (
            "learner.minibatches=5",
            "--set learner.minibatches=5: learner.groups_per_step (16) must be a multiple",
        ),
    ],
)
def test_a_problem_of_an_override_points_at_the_option(write, override, problem):
    found = problems_of(write(GOOD), [override])
    assert len(found) == 1
    assert found[0].startswith(problem)


def test_problems_of_the_file_and_of_options_are_reported_together(write):
    found = problems_of(write(GOOD + "learner: {lr: fast}\n"), ["rollout.replicas=x"])
    assert [line.split(":")[0] for line in found] == ["a.yaml", "--set rollout.replicas=x"]


def test_a_later_problem_finds_the_place_of_its_key(write):
    loaded = load(write(GOOD), ["data.train=other.parquet"])
    problems = ConfigProblems(
        [Problem("no such folder", key="model.path"), Problem("no file", key="data.train")]
    )
    assert str(problems.placed(loaded.places)) == (
        "a.yaml:1:15: no such folder\n--set data.train=other.parquet: no file"
    )


def test_a_long_value_is_cut(write):
    assert len(problems_of(write(GOOD + f"learner: {{lr: {'x' * 500}}}\n"))[0]) < 150


def test_a_missing_file_and_a_binary_one_are_configuration_errors(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "nope.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "b.yaml")


def test_problems_survive_pickling(write):
    with pytest.raises(ConfigProblems) as caught:
        load_config(write("a: 1\n"))
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        ("[{weight: 1}]", "a.yaml:3:10: reward.fn.0.fn is missing"),
        ("[{fn: a, weight: x}]", "a.yaml:3:31: reward.fn.0.weight is 'x', but must be a number"),
        ("[{fn: a, name: a/b}]", "a.yaml:3:29: reward.fn.0.name is 'a/b', but must be letters"),
        ("[]", "a.yaml:3:14: reward.fn is [], but must be a list with 1 or more items"),
        ("5", "a.yaml:3:14: reward.fn is 5, but must be a list"),
    ],
)
def test_a_problem_of_one_of_several_rewards_names_its_place(write, fn, problem):
    text = GOOD.replace("gsm8k", fn)
    (found,) = problems_of(write(text))
    assert found.startswith(problem)


def test_rewards_are_a_name_or_a_list_of_names_and_sections_with_arguments(write):
    one = load_config(write(GOOD)).reward.fn
    assert [(part.fn, part.weight, part.name, part.arguments) for part in one] == [("gsm8k", 1.0, None, {})]
    path = write(GOOD.replace("gsm8k", "[math, {fn: format, weight: 2, name: form, pattern: boxed, n: [1]}]"))
    config = load_config(path)
    assert config.reward.fn[0] == type(one[0])(fn="math")
    assert config.reward.fn[1].arguments == {"pattern": "boxed", "n": [1]}
    assert load_config(write(dump_resolved(config))) == config

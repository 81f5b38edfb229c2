"""Secrets belong into the environment: a configuration that holds one is refused, and does not repeat it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.core.config.load import load_config
from asyncrl.core.errors import ConfigError

BASE = "model: {path: m}\ndata: {train: t}\n"
PLANTED = "planted-7f31"


def load(tmp_path: Path, text: str, *sets: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(BASE + text)
    load_config(file, list(sets))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f"buffer: {{journal: redis, url: 'redis://buffer:{PLANTED}@host:6379/0'}}", "buffer.url"),
        (f"buffer: {{journal: redis, url: 'redis://:{PLANTED}@host'}}", "buffer.url"),
        (f"buffer: {{journal: redis, url: 'rediss://host/0?ssl_password={PLANTED}'}}", "buffer.url"),
        (f"buffer: {{journal: redis, url: 'redis://u:x${{NAME}}{PLANTED}@host'}}", "buffer.url"),
        (f"rollout: {{environment: {{name: tool, api_key: {PLANTED}}}}}", "rollout.environment.api_key"),
        (
            f"rollout: {{environment: {{name: tool, of: ['https://u:{PLANTED}@h']}}}}",
            "rollout.environment.of.0",
        ),
        (f"metrics: {{sinks: [{{wandb: {{token: {PLANTED}}}}}]}}", "metrics.sinks.0.wandb.token"),
        (f"metrics: {{sinks: [{{wandb: {{hf_token: {PLANTED}}}}}]}}", "metrics.sinks.0.wandb.hf_token"),
        (
            f"rollout: {{environment: {{name: tool, headers: {{Authorization: Bearer {PLANTED}}}}}}}",
            "rollout.environment.headers.Authorization",
        ),
        (
            f"rollout: {{environment: {{name: tool, headers: {{X-Api-Key: {PLANTED}}}}}}}",
            "rollout.environment.headers.X-Api-Key",
        ),
        (f"rollout: {{environment: {{name: tool, keys: {{private_key: {PLANTED}}}}}}}", "rollout.envir"),
        (f"rollout: {{environment: {{name: tool, credentials: [{PLANTED}]}}}}", "rollout.environment"),
        ("rollout: {environment: {name: tool, password: 73100}}", "rollout.environment.password"),
        (f"rollout: {{environment: {{name: tool, url: 'https://h/?auth_token={PLANTED}'}}}}", "rollout.env"),
    ],
)
def test_a_secret_in_the_file_is_refused_with_its_place_and_is_not_repeated(
    tmp_path: Path, text: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"run\.yaml:3:\d+: {key}\S* holds a (password|secret)") as caught:
        load(tmp_path, f"{text}\nreward: {{fn: gsm8k}}\n")
    assert PLANTED not in str(caught.value)


def test_a_secret_given_as_an_option_is_refused_too(tmp_path: Path) -> None:
    url = f"buffer.url=redis://buffer:{PLANTED}@host"
    with pytest.raises(ConfigError, match=r"buffer\.url holds a password") as caught:
        load(tmp_path, "reward: {fn: gsm8k}\n", "buffer.journal=redis", url)
    assert PLANTED not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        (f"metrics.sinks=[{{wandb: {{api_key: {PLANTED}}}}}]", "--set metrics.sinks=***: "),
        (f"metrics.sinks={{wandb: {{'api_key' : {PLANTED}, x: [}}}}", "--set metrics.sinks=***: this is not"),
        (f"rollout.environment={{name: tool, token: {PLANTED}}}", "--set rollout.environment=***: "),
        (f"rollout.environment.token={PLANTED}", "--set rollout.environment.token=***: "),
        (f"buffer.password={PLANTED}", "--set buffer.password=***: unknown key"),
        (f"buffer.url=redis://host?password={PLANTED}&db=0", "--set buffer.url=***: "),
        (f"buffer.url=redis://me:{PLANTED}@host", "--set buffer.url=redis://me:***@host: "),
        (f"buffer.url:secret:{PLANTED}", "--set ***: an option has the form key=value"),
    ],
)
def test_an_option_that_names_a_secret_is_told_by_its_key_alone(
    tmp_path: Path, option: str, shown: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "reward: {fn: gsm8k}\nbuffer: {journal: redis}\n", option)
    assert shown in str(caught.value) and PLANTED not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"metrics: {{sinks: [{{wandb: {{api_key: {PLANTED}}}, x: 1}}]}}",
        f"metrics: {{sinks: 3}}\nrun: {{name: {{secret: {PLANTED}}}}}",
        f"rollout: {{max_tokens: [{{url: 'https://h?api_key={PLANTED}'}}]}}",
        f"buffer: {{journal: redis, url: 'http://host?password={PLANTED}'}}",
    ],
)
def test_a_value_that_is_wrong_is_shown_without_the_secrets_in_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r" is .*, but must be ") as caught:
        load(tmp_path, f"{text}\nreward: {{fn: gsm8k}}\n")
    assert PLANTED not in str(caught.value) and "***" in str(caught.value)


def test_a_reward_server_with_a_password_in_its_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.fn\.0\.fn holds a password") as caught:
        load(tmp_path, f"reward: {{fn: 'https://me:{PLANTED}@scores.example/v1'}}\n")
    assert PLANTED not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "buffer: {journal: redis, url: 'redis://buffer:${REDIS_PASSWORD}@host:6379/0'}",
        "buffer: {journal: redis, url: 'rediss://host/0?ssl_ca_certs=/etc/ca.pem'}",
        "buffer: {journal: redis, url: '${REDIS_URL}'}",
        "rollout: {environment: {name: tool, api_key_env: TOOL_KEY, api_key: ''}}",
        "rollout: {environment: {name: tool, eos_token: </s>, token: 7, token_limit: 9, secret: '${TOOL}'}}",
    ],
)
def test_what_the_environment_holds_may_be_named(tmp_path: Path, text: str) -> None:
    load(tmp_path, f"{text}\nreward: {{fn: gsm8k}}\n")

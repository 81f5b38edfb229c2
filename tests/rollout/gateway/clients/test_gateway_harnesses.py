"""Agent harnesses as their users install them, against the gateway: only their base URL is another."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import ConfigError
from rollout_service.sandbox.contract import SandboxSettings
from rollout_service.sandbox.local import LocalSandboxes
from tests.rollout.gateway.gateway_parts import ENGINES, Agent, Stage
from tests.rollout.gateway.test_gateway import rewarded
from tests.rollout.gateway.test_gateway_tools import check_transcript
from tests.rollout.gateway.tool_model import BROKEN, CHECK, TRANSCRIPTS, Transcript
from tests.rollout.gateway.tool_parts import open_tool_stage

BIN = Path(".venv-agents/bin").absolute()
HARNESS_S = 240
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (BIN / "python").exists(), reason="no .venv-agents: make setup LIST=agents"),
]
IN_REPOSITORY, WITH_A_CALL, *_ = TRANSCRIPTS
CLIENTS = {
    "openai": """
import json, openai
client, messages = openai.OpenAI(), [{"role": "user", "content": QUESTION}]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
while True:
    asked = {"model": "gpt-5", "messages": messages, "tools": tools}
    with client.chat.completions.stream(**asked) as stream:
        message = stream.get_final_completion().choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": weather(city)})
print(message.content)
""",
    "anthropic": """
import anthropic
runner = anthropic.Anthropic().beta.messages.tool_runner(
    model="claude-opus-4-5",
    max_tokens=1000,
    tools=[anthropic.beta_tool(weather)],
    messages=[{"role": "user", "content": QUESTION}],
)
print(runner.until_done().content[-1].text)
""",
    "openai-agents": """
import agents
agent = agents.Agent(name="a", instructions="Be brief.", model="gpt-5", tools=[agents.function_tool(weather)])
print(agents.Runner.run_sync(agent, QUESTION).final_output)
""",
    "openai-agents, streamed": """
import agents, asyncio
agent = agents.Agent(name="a", instructions="Be brief.", model="gpt-5", tools=[agents.function_tool(weather)])
async def run():
    result = agents.Runner.run_streamed(agent, QUESTION)
    async for event in result.stream_events():
        pass
    print(result.final_output)
asyncio.run(run())
""",
    "openai-agents over chat completions": """
import agents
agents.set_default_openai_api("chat_completions")
agent = agents.Agent(name="a", instructions="Be brief.", model="gpt-5", tools=[agents.function_tool(weather)])
print(agents.Runner.run_sync(agent, QUESTION).final_output)
""",
}
TOOL = '''
QUESTION = {question!r}
def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: Where.
    """
    return "sunny" if city == "Paris" else "unknown"
'''


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_tool_stage(tmp_path_factory.mktemp("harnesses"), "hermes", request.param) as stage:
        yield stage


ENVIRONMENT = {
    "HOME": "",
    "OPENAI_BASE_URL": "",
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_BASE_URL": "",
    "ANTHROPIC_API_KEY": "none",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Of a harness; the first and the URLs are filled in."""


def run_harness(agent: Agent, folder: Path, *command: str) -> str:
    """Run a command of the agents' environment, which knows the session's base URL; return what it said."""
    folder.mkdir(exist_ok=True)
    environment = {
        **ENVIRONMENT,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(folder),
        "OPENAI_BASE_URL": agent.session["base_url"],
        "ANTHROPIC_BASE_URL": agent.session["anthropic_base_url"],
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HARNESS_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def check_group(served: Stage, agents: list[Agent], transcript: Transcript) -> None:
    """Reward the agents and check that each trajectory is the transcript, token by token."""
    group = rewarded(served, *agents)
    for trajectory in group.trajectories:
        assert trajectory.num_turns == len(transcript.answers)
        check_transcript(served, group, trajectory, transcript)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_calls_its_tool_and_reads_the_answer(served: Stage, client: str, tmp_path: Path):
    agents = [served.open(), served.open()]
    script = TOOL.format(question=WITH_A_CALL.question) + CLIENTS[client]
    for agent in agents:
        assert run_harness(agent, tmp_path, "python", "-c", script).strip() == "It is sunny in Paris."
    check_group(served, agents, WITH_A_CALL)


MINI = ["mini", "--model", "openai/policy", "--task", "Make add add.", "--yolo", "--exit-immediately"]


def check_repaired(code: str, log: str) -> None:
    """Check mini-swe-agent's file and its own log of the episode."""
    assert code == "def add(a, b):\n    return a + b\n"
    told: dict[str, Any] = json.loads(log)
    assert told["info"]["exit_status"] == "Submitted"
    executed = [m for m in told["messages"] if m["role"] == "tool" and m["extra"]["returncode"] == 0]
    assert len(executed) == 4, "the fifth call ends the episode"


def test_mini_swe_agent_repairs_a_repository(served: Stage, tmp_path: Path):
    agents = [served.open(), served.open()]
    for number, agent in enumerate(agents):
        repository, log = tmp_path / str(number), tmp_path / f"{number}.json"
        repository.mkdir()
        (repository / "add.py").write_text(BROKEN)
        (repository / "check.py").write_text(CHECK)
        run_harness(agent, repository, *MINI, "--output", str(log))
        check_repaired((repository / "add.py").read_text(), log.read_text())
    check_group(served, agents, IN_REPOSITORY)


def isolate(*command: str) -> list[str]:
    """Return the command line that runs a harness in a sandbox with the machine's network."""
    limits = SandboxSettings(
        memory_bytes=4 << 30, files_bytes=64 << 20, processes=64, network=True, folders=[str(BIN.parent)]
    )
    try:
        return LocalSandboxes(limits).wrap(command, [name for name in ENVIRONMENT if name != "HOME"])
    except ConfigError as error:
        pytest.skip(str(error))


def test_mini_swe_agent_repairs_a_repository_in_a_sandbox(served: Stage, tmp_path: Path):
    agents = [served.open(), served.open()]
    script = f"""
        mkdir repository && cd repository && printf '%s' "$1" > add.py && printf '%s' "$2" > check.py
        {BIN}/"$3" "$4" "$5" "$6" "$7" "$8" "$9" --output ../log.json >&2
        echo $(hostname) $(id -u) $(pwd); echo --; cat add.py; echo --; cat ../log.json
    """
    for agent in agents:
        command = isolate("sh", "-c", script, "sh", BROKEN, CHECK, *MINI)
        where, code, log = run_harness(agent, tmp_path, *command).split("--\n", 2)
        assert where == "sandbox 1000 /sandbox/repository\n"
        check_repaired(code, log)
    assert not list(tmp_path.iterdir()), "it wrote outside of its sandbox"
    check_group(served, agents, IN_REPOSITORY)

"""Tools that run code in the episode's sandbox, and those of a real MCP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.config.tree import EnvironmentSection
from asyncrl.core.errors import ConfigError
from rollout_service.environments.protocol import Environment, EnvironmentFailed
from rollout_service.environments.registry import load_environment
from rollout_service.environments.tools.tool_use import ToolUse
from rollout_service.sandbox import local
from rollout_service.sandbox.local import LocalSandbox

SERVER = Path(__file__).with_name("mcp_tools.py")
CODE: Any = {"tools": [{"shell": {"timeout_s": 60.0}}, {"code_interpreter": {"timeout_s": 60.0}}]}


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def results(episode: Environment, *calls: str) -> list[str]:
    step = await episode.step("".join(calls))
    assert not isinstance(step.observation, str)
    return [message["content"] for message in step.observation]


def begin(use: ToolUse) -> Environment:
    return use(None, 0)  # type: ignore[arg-type]


def ask(use: ToolUse, *calls: str) -> list[str]:
    return asyncio.run(results(begin(use), *calls))


def test_the_code_tools_of_an_episode_share_files_that_no_other_episode_sees() -> None:
    use = ToolUse(**CODE)
    first, second = begin(use), begin(use)

    async def work() -> list[str]:
        found = await results(first, call("shell", command="echo 5 > x"))
        found += await results(first, call("code_interpreter", code="print(int(open('x').read()) + 1)"))
        found += await results(second, call("shell", command="cat x"))
        await first.close()
        return found

    assert asyncio.run(work()) == ["", "6", "cat: x: No such file or directory\nexit code 1"]


@pytest.mark.parametrize(
    ("wanted", "result"),
    [
        (call("shell", command="echo a; echo b >&2; exit 3"), "a\nb\nexit code 3"),
        (call("code_interpreter", code="1/0"), "ZeroDivisionError: division by zero\nexit code 1"),
        (call("shell", command="\0"), "exit code 127"),
        (call("shell", command="\ud800"), "exit code 127"),
        (call("shell", command="x" * 20_001), "error: at most 20000 characters"),
        (call("shell", code="1"), "error: 'shell' needs the text 'command'"),
        (call("shell", command="yes"), "..."),
    ],
)
def test_a_call_is_answered_with_all_that_the_code_said(wanted: str, result: str) -> None:
    (found,) = ask(ToolUse(**CODE), wanted)
    assert found.endswith(result)


def test_code_that_used_up_its_time_ends_the_calls_of_its_turn() -> None:
    use = ToolUse({"shell": {"timeout_s": 0.5}})
    found = ask(use, call("shell", command="echo a; sleep 600"), call("shell", command="echo b"))
    assert found == [
        "error: it took longer than 0.5 s\na",
        "error: not made, for this turn's calls took too long",
    ]


def test_a_sandbox_that_fails_is_a_failure_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    use = ToolUse(**CODE)
    monkeypatch.setattr(local, "PYTHON", "/bin/false")
    with pytest.raises(EnvironmentFailed, match="the sandbox failed"):
        ask(use, call("shell", command="echo a"))


def test_the_end_of_an_episode_destroys_its_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[bool] = []
    destroy = LocalSandbox.destroy

    async def noted(box: LocalSandbox) -> None:
        destroyed.append(True)
        await destroy(box)

    monkeypatch.setattr(LocalSandbox, "destroy", noted)
    asyncio.run(begin(ToolUse(["shell"])).close())
    asyncio.run(begin(ToolUse(["calculator"])).close())
    assert destroyed == [True]


def test_a_machine_that_cannot_isolate_refuses_code_unless_the_configuration_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> str:
        raise ConfigError("this machine cannot isolate code")

    monkeypatch.setattr(local, "find_way", refuse)
    for name in ("shell", "code_interpreter"):
        with pytest.raises(ConfigError, match="cannot isolate"):
            load_environment(EnvironmentSection.model_validate({"name": "tools", "tools": [name]}))
    assert ToolUse(["calculator"]).tools
    use = ToolUse(**CODE, sandbox={"isolate": False})
    assert ask(use, call("shell", command="echo a")) == ["a"]


def over_streams(**told: object) -> dict[str, Any]:
    return {"command": [sys.executable, str(SERVER)], **told}


@contextlib.contextmanager
def serve(*key: str) -> Iterator[dict[str, Any]]:
    """Serve over HTTP, to clients with that key alone if there is one."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port), *key], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            signal.sigtimedwait([], 0.1)
        yield {"url": f"http://127.0.0.1:{port}/mcp"}
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def over_http() -> Iterator[dict[str, Any]]:
    with serve() as server:
        yield server


CALLS: Sequence[tuple[str, Callable[[str], bool]]] = (
    (call("add", first=1, second=2), "3".__eq__),
    (call("fail"), lambda said: said.startswith("error: Error executing tool fail")),
    (call("add", first="x"), lambda said: said.startswith("error: ") and "valid integer" in said),
    (call("long", num_chars=5000), ("x" * 2000 + "...").__eq__),
    (call("nope"), lambda said: "there is no tool 'nope', only calculator, add" in said),
    (call("calculator", expression="2*3"), "6".__eq__),
    (call("wait", seconds=600), "error: it took longer than 5 s".__eq__),
)


def check_calls(server: dict[str, Any], calls: Sequence[tuple[str, Callable[[str], bool]]] = CALLS) -> None:
    use = ToolUse(["calculator", {"mcp": {**server, "timeout_s": 5}}], result_chars=2000)
    found = ask(use, *(wanted for wanted, _ in calls))
    assert [said for said, (_, is_right) in zip(found, calls, strict=True) if not is_right(said)] == []


def test_tools_of_a_server_over_streams_are_called_within_sizes() -> None:
    check_calls(over_streams(), CALLS[:-1])


@pytest.mark.long
def test_tools_of_a_server_over_streams_are_called_within_deadlines() -> None:
    check_calls(over_streams(), CALLS[-1:])


@pytest.mark.long
def test_tools_of_a_server_over_http_are_called_within_deadlines_and_sizes(over_http: dict[str, Any]) -> None:
    check_calls(over_http)


@pytest.mark.long
def test_a_server_that_wants_a_key_gets_it_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_KEY", "planted-key")
    with serve("planted-key") as server:
        check_calls({**server, "key_env": "MCP_KEY"}, CALLS[:2])
        with pytest.raises(ConfigError, match="lists no tools") as refused:
            assert ToolUse([{"mcp": server}]).tools
    assert "planted" not in str(refused.value)


@pytest.mark.long
def test_the_schemas_of_a_server_are_those_that_a_prompt_describes() -> None:
    section = {"name": "tools", "tools": ["calculator", {"mcp": over_streams()}]}
    episodes = load_environment(EnvironmentSection.model_validate(section))
    told: dict[str, Any] = {tool["function"]["name"]: tool["function"] for tool in episodes.tools}  # type: ignore[index]
    assert [*told] == ["calculator", "add", "fail", "wait", "long", "die", "look"]
    assert told["add"]["description"] == "Add two numbers."
    assert told["add"]["parameters"]["required"] == ["first", "second"]


@pytest.mark.long
def test_a_server_that_ends_fails_the_episode_and_is_started_again_once() -> None:
    use = ToolUse([{"mcp": over_streams()}])
    assert use.tools

    async def work() -> list[str]:
        with pytest.raises(EnvironmentFailed, match="ended in a call"):
            await results(begin(use), call("die"))
        found = await results(begin(use), call("add", first=1, second=2))
        for _ in range(2):
            with pytest.raises(EnvironmentFailed, match="ended in a call"):
                await results(begin(use), call("die"))
        with pytest.raises(EnvironmentFailed, match="ended again after a restart"):
            await results(begin(use), call("add", first=1, second=2))
        return found

    assert asyncio.run(work()) == ["3"]


@pytest.mark.long
def test_a_server_that_ends_under_several_calls_has_ended_once() -> None:
    use = ToolUse([{"mcp": over_streams()}])
    assert use.tools

    async def work() -> list[str]:
        dying = (results(begin(use), call("die")) for _ in range(4))
        ended = await asyncio.gather(*dying, return_exceptions=True)
        assert all("ended in a call" in str(one) for one in ended), ended
        return await results(begin(use), call("add", first=1, second=2))

    assert asyncio.run(work()) == ["3"]


@pytest.mark.long
def test_a_server_in_a_sandbox_sees_nothing_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", "1")
    monkeypatch.setenv("FOR_SERVER", "2")
    (tmp_path / "secret").touch()
    look = call("look", path=str(tmp_path / "secret"))
    plain = ask(ToolUse([{"mcp": over_streams(env=["FOR_SERVER"])}]), look)
    sandbox = {"folders": [sys.prefix, str(SERVER.parent)], "memory_bytes": 4 << 30}
    boxed = ask(ToolUse([{"mcp": over_streams(env=["FOR_SERVER"], sandbox=True)}], sandbox=sandbox), look)
    assert plain[0].startswith("True ") and plain[0].endswith(" 2 None")
    assert boxed[0].startswith("False ") and boxed[0].endswith(" 2 None") and int(boxed[0].split()[1]) < 10


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        ({}, "'command' .a list. or a 'url'"),
        ({"command": ["x"], "url": "http://x"}, "'command' .a list. or a 'url'"),
        ({"command": "x y"}, "'command' .a list. or a 'url'"),
        ({"command": ["x"], "env": ["NO_SUCH"]}, "NO_SUCH, not set"),
        ({"url": "http://x", "key_env": "NO_SUCH"}, "NO_SUCH, not set"),
        ({"command": ["x"], "key_env": "HOME"}, "key_env needs a 'url'"),
        ({"command": ["x"], "seconds": 1}, "does not take"),
        ({"command": ["/bin/false"]}, "lists no tools"),
        ({"command": ["/no/such/program"]}, "lists no tools"),
    ],
)
def test_servers_that_cannot_be_had_are_refused_at_the_start(server: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _ = ToolUse([{"mcp": server}]).tools


@pytest.mark.long
def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are called add"):
        _ = ToolUse([{"mcp": over_streams()}, {"mcp": over_streams()}]).tools


def test_without_the_sdk_its_tools_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match="need the package mcp"):
        ToolUse([{"mcp": over_streams()}])

"""Untrusted text on every surface: it steers no terminal and forges no log record.

The texts are those of agents' errors, reward parts, names of metrics, of services and of runs.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert
from msgspec.structs import replace
from rich.console import Console

from asyncrl.cli import exits
from asyncrl.cli.live import panel_of, text_of
from asyncrl.cli.reports import account, weights
from asyncrl.cli.reports.logs import TIME, Logs, Writer
from asyncrl.cli.reports.status import table_of
from asyncrl.cli.rollouts.fates import Fate
from asyncrl.cli.rollouts.sheet import Sheet
from asyncrl.cli.rollouts.terminal import sheet_on_terminal
from asyncrl.cli.run.ending import paragraph
from asyncrl.cli.timeline.sync_history import Membership, WeightsReport
from asyncrl.cli.views import LineView, PanelView
from asyncrl.control.diagnosis.waits import Diagnosis
from asyncrl.control.record.outcome import Outcome
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.snapshot import Snapshot
from asyncrl.core.files.printable import printable
from asyncrl.core.states import RunState
from asyncrl.core.status.service import MemberStatus
from asyncrl.page.rollouts import rollouts_of
from asyncrl.page.view import view_of
from tests.page.page_runs import make_group, make_snapshot
from tests.statuses import filled, snapshot_of
from weight_sync.sync_records import BlameRecord

ROOT = Path(__file__).parents[2]
FORGED = "2026-11-23 16:00:00,000 CRITICAL forged"
PAYLOADS = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J\x1b[H",
    "link": "\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;b3duZWQ=\x07",
    "return": f"\r{FORGED}",
    "c1": "\x9b2J\x9d0;owned\x9c\x85",
    "bidi": "\u202egnitrats\u202c \u2066x\u2069 \u200f",
    "lines": "a\x0bb\x0cc\u2028d\u2029e",
    "surrogate": "\udc9b",
    "record": f"\n{FORGED}",
}
MARKUP = "[link=http://evil]x[/link][bold red]y[/]"
EVIL = "".join(PAYLOADS.values()) + MARKUP
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def harm_in(text: str) -> str:
    """Return what of the payload steers a terminal or begins a line in `text`; empty if nothing does."""
    if "owned" not in text:
        return "the text does not tell of the payload"
    found = STEERING.search(text) or re.search(rf"^{FORGED}", text, re.MULTILINE)
    return repr(found[0]) if found else ""


def evil_snapshot() -> Snapshot:
    """Return a snapshot in which every text that a service has a say in is the payload."""
    snapshot = make_snapshot() | {"phase": EVIL, "error": EVIL, "torn": [EVIL], "resumed_step": 3}
    snapshot["bottleneck"] = {"who": EVIL, "why": EVIL, "learner_waits_for": EVIL}
    snapshot["services"][f"rollout.{EVIL}"] = {"state": "READY", "version": 3, "gateway": EVIL}
    snapshot["ledger"]["dropped"] = {EVIL: 1}
    snapshot["obstacles"] = [{"service": EVIL, "reason": EVIL, "count": 2, "since": 0.0, "blocks": True}]
    snapshot["events"] = [{"time": 9e9, "kind": "exit", "service": EVIL, "text": EVIL}]
    return snapshot_of(snapshot)


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_each_payload_is_written_out_and_x(payload: str) -> None:
    found = printable(payload)
    assert not STEERING.search(found) and printable(found) == found
    assert printable("é 漢 字\u3000👍\tx\n") == "é 漢 字\u3000👍\tx\n"


SERVICE = """
import sys, traceback
from pathlib import Path
from asyncrl.core.config.tree import Config
from asyncrl.control.ray.host import ServiceHost
from asyncrl.core.service import ServiceContext
import logging
EVIL = sys.stdin.buffer.read().decode(errors="surrogatepass")
def build(context):
    logging.getLogger("a").warning("agent_failed: session %s: %s", 1, EVIL)
    raise RuntimeError(EVIL)
sys.modules["evil_service"] = sys.modules["__main__"]
config = Config(model={"path": "m"}, data={"train": "t"}, reward={"fn": "gsm8k"})
host = ServiceHost("evil_service:build", ServiceContext(config, "a.0", Path(sys.argv[1]), "id"), sys.argv[2])
while host.describe().state != "FAILED":
    pass
"""


def test_a_service_logs_what_an_agent_says_as_one_record_that_steers_nothing(tmp_path: Path) -> None:
    log = tmp_path / "a.0.log"
    command = [sys.executable, "-c", SERVICE, str(tmp_path), str(log)]
    subprocess.run(command, input=EVIL.encode(errors="surrogatepass"), timeout=120, check=True)
    text = log.read_text()
    assert harm_in(text) == ""
    assert len([line for line in text.splitlines() if TIME.match(line)]) == 2, "the warning and the failure"


def test_the_head_formats_its_records_in_the_same_way() -> None:
    tree = ast.parse((ROOT / "asyncrl/control/ray/head.py").read_text())
    (main,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert "log_to_stderr()" in [ast.unparse(line) for line in main.body]


def shown_logs(folder: RunDir) -> str:
    """Return what `asyncrl logs` prints of a log that another program wrote into."""
    out = io.StringIO()
    stdout, sys.stdout = sys.stdout, out
    try:
        Writer(as_json=False, has_colors=False).write(Logs(folder, []).tail(100))
    finally:
        sys.stdout = stdout
    return out.getvalue()


def test_logs_write_out_what_another_program_wrote(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.logs.mkdir()
    folder.log("rollout.0").write_text(f"{FORGED} before\n" + EVIL, errors="surrogatepass")
    with folder.log("rollout.0").open("a") as file:
        file.write("\n")
    assert harm_in(shown_logs(folder)) == ""


def drawn(snapshot: Snapshot) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100, force_terminal=False).print(panel_of(snapshot))
    return stream.getvalue()


def lines_of_up(snapshot: Snapshot) -> str:
    stream = io.StringIO()
    view = LineView(stream)
    view.show(snapshot_of(make_snapshot()))
    view.show(snapshot)
    view.close()
    return stream.getvalue()


def failure(snapshot: Snapshot, folder: Path = Path("nowhere")) -> str:
    outcome = Outcome(state=RunState.FAILED, error=EVIL, service="rollout.0", tail=(EVIL, "x"))
    return paragraph(RunDir(folder), outcome)


SURFACES: dict[str, Callable[[Snapshot], str]] = {
    "status": lambda snapshot: "\n".join(text_of(snapshot)),
    "status --all": lambda snapshot: "\n".join(table_of([snapshot])),
    "status -w": drawn,
    "up | cat": lines_of_up,
    "the failure paragraph": failure,
    "the page": lambda snapshot: "\n".join(_texts(view_of(snapshot))),
}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from (name, *_texts(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    else:
        yield str(value).replace("\n", " ")  # a line of the page is no line of a terminal


@pytest.mark.parametrize("surface", SURFACES)
def test_no_surface_passes_on_what_would_steer_a_terminal_or_look_like_its_own_line(surface: str) -> None:
    assert harm_in(SURFACES[surface](evil_snapshot())) == ""


def test_the_panel_reads_no_markup_and_sends_the_terminal_its_own_sequences_alone() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    view = PanelView(stream)
    view._console = Console(file=stream, width=100, height=200, force_terminal=True)
    bottleneck = {"who": "rollout", "why": MARKUP, "learner_waits_for": "rollout"}
    view.show(replace(evil_snapshot(), bottleneck=Diagnosis(**bottleneck)))
    text = stream.getvalue()
    assert f"Bottleneck: the replicas. {MARKUP}" in text, "markup is a text like any other"
    assert not re.search(r"\x1b(?!\[[0-9;]*[mJKA])", text), "colours, and the panel's own moves"
    assert "\x1b[2J" not in text and not STEERING.search(re.sub(r"\x1b\[[0-9;]*[mJKA]|\r", "", text))


def test_reports_of_inspect_write_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    member = convert(filled(MemberStatus, {"state": "READY", "error": EVIL}), MemberStatus)
    report = WeightsReport(
        run="x",
        told_by=EVIL,
        token=1,
        version=None,
        digest="",
        num_bytes=0,
        replicas={EVIL: member},
        counters={EVIL: 1},
        membership=Membership(1, (EVIL,)),
        rounds=(),
        failures=(BlameRecord(EVIL, EVIL, 1),),
    )
    exits.show(*weights.lines_of(report))
    assert harm_in(capsys.readouterr().out) == ""
    exits.show(*account.lines_of({"max_lag": 1, "lag": {}, "dropped": {EVIL: 2}}))
    assert harm_in(capsys.readouterr().out) == ""


def test_what_a_group_was_dropped_for_is_written_out() -> None:
    fate = Fate(ticket=3, attempt=1, state="dropped", step=4, reason=EVIL, is_given_up=False)
    stream = io.StringIO()
    sheet = Sheet("x", "dropped groups", [], 0, [fate])
    Console(file=stream, width=1000).print(sheet_on_terminal(sheet, has_colors=False), soft_wrap=True)
    assert harm_in(stream.getvalue()) == ""


def test_what_a_model_wrote_is_written_out_on_the_page() -> None:
    (found,) = rollouts_of([make_group(3)], lambda ids: EVIL)
    assert harm_in("\n".join(_texts(found))) == ""


def test_an_error_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    exits.say(f"asyncrl: {EVIL}")
    text = capsys.readouterr().err
    assert "owned" in text and not STEERING.search(text), "what an error says may have lines"


WRITERS = ("print", "sys.stdout.write", "typer.echo")
OUR_OWN = ("__version__", "render()", "context.get_help()", "trace", "line", r"'\x1b[H\x1b[2J'")
"""JSON in a variable, the commands' own page, a line that is printable already, what clears the screen."""


def test_every_print_of_the_command_line_is_json_or_goes_through_one_of_the_printers() -> None:
    """A new `print` of a text would be a way around `printable`."""
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call.args[0])}"
        for path in sorted((ROOT / "asyncrl/cli").rglob("*.py"))
        if path.name not in ("exits.py", "views.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in WRITERS
        if ast.unparse(call.args[0]).partition("(")[0] != "json.dumps"
        if ast.unparse(call.args[0]) not in OUR_OWN
    ]
    assert found == []


def test_json_writes_control_characters_as_escapes() -> None:
    assert not STEERING.search(json.dumps({EVIL: EVIL}))

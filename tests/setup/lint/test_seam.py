"""List of the modules that reach past the runtime for time, threads, ids or sockets."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("asyncrl", "learner", "rollout_service", "weight_sync")
FORBIDDEN: dict[str, frozenset[str] | None] = {
    "time": frozenset({"time", "time_ns", "monotonic", "monotonic_ns", "sleep"}),
    "threading": frozenset({"Thread", "Event", "Lock", "RLock", "Condition", "Semaphore", "Timer"}),
    "asyncio": frozenset({"run"}),
    "concurrent": None,
    "queue": None,
    "secrets": None,
    "uuid": None,
    "zmq": None,
}
"""By module, the names that are the runtime's; None for all. `time.perf_counter` decides nothing."""

RUNTIME = "is a part of the runtime"
SECRET = "draws a secret, which must not be what a seed gives"
LAUNCH = "Ray, processes and ports, which tests in virtual time do not run"
OUTSIDE = "HTTP or a sink's thread, which decides nothing of the run"
STORAGE = "storage that tests in virtual time play"
LEARNING = "inside a learner's ranks, which tests in virtual time play"
ENGINE = "beside an engine, a gateway or a reward, which tests in virtual time play"
ALLOWED = {
    "asyncrl/core/runtime/clock.py": RUNTIME,
    "asyncrl/core/sockets/frames.py": RUNTIME,
    "asyncrl/core/sockets/line.py": RUNTIME,
    "asyncrl/core/sockets/listener.py": RUNTIME,
    "asyncrl/core/sockets/options.py": RUNTIME,
    "asyncrl/core/runtime/threads.py": RUNTIME,
    "asyncrl/core/runtime/faults.py": "strikes real processes; the simulator has faults of its own",
    "asyncrl/core/sockets/keys.py": SECRET,
    "asyncrl/core/files/private.py": SECRET,
    "asyncrl/control/record/sinks/opening.py": SECRET,
    "rollout_service/gateway/keys.py": SECRET,
    "weight_sync/memory/sharded_publish.py": SECRET,
    "asyncrl/buffer/journals/redis/past.py": STORAGE,
    "asyncrl/buffer/journals/redis/server.py": STORAGE,
    "asyncrl/core/metrics/row_log.py": STORAGE,
    "weight_sync/coordination/journal.py": STORAGE,
    "asyncrl/control/api/server.py": OUTSIDE,
    "asyncrl/control/ray/cluster_launcher.py": LAUNCH,
    "asyncrl/cli/run/wait_for_nodes.py": LAUNCH,
    "asyncrl/control/ray/bootstrap.py": LAUNCH,
    "asyncrl/cli/run/handle.py": LAUNCH,
    "asyncrl/control/ray/head.py": LAUNCH,
    "asyncrl/control/ray/host.py": LAUNCH,
    "asyncrl/control/ray/supervisor_watchdog.py": LAUNCH,
    "asyncrl/control/machine/processes.py": LAUNCH,
    "asyncrl/control/ray/launcher.py": LAUNCH,
    "asyncrl/control/ray/membership.py": LAUNCH,
    "asyncrl/cli/run/start.py": LAUNCH,
    "asyncrl/page/feed.py": OUTSIDE,
    "asyncrl/control/record/sinks/services/mlflow.py": OUTSIDE,
    "asyncrl/control/record/sinks/outbox.py": OUTSIDE,
    "asyncrl/control/record/sinks/tensorboard.py": OUTSIDE,
    "learner/record/processes.py": LEARNING,
    "learner/record/recorder.py": LEARNING,
    "rollout_service/engine/sglang/child/__main__.py": ENGINE,
    "rollout_service/engine/vllm/nodes/peers.py": LAUNCH,
    "rollout_service/engine/vllm/plugin.py": ENGINE,
    "rollout_service/evaluation/standalone.py": "an entry point",
    "rollout_service/gateway/sessions.py": ENGINE,
    "rollout_service/rewards/lines.py": "an entry point",
    "rollout_service/rewards/served/frames.py": ENGINE,
}
MOST_ALLOWED = 41
"""Lower it with each entry that goes."""
CONSTRUCTED = (
    "Client",
    "AsyncClient",
    "Server",
    "LearnerClient",
    "ReplicaClient",
    "FileJournal",
    "RedisJournal",
)
"""What takes the runtime of its process, and what can do without in a program of a user's own."""


@functools.cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return tuple((str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in files)


def is_forbidden(module: str, name: str | None) -> bool:
    top = module.partition(".")[0]
    if top not in FORBIDDEN:
        return False
    names = FORBIDDEN[top]
    return names is None or name in names


def reaches_past(tree: ast.Module) -> bool:
    """Tell whether a module takes something that is the runtime's, by `import` or as an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(
            is_forbidden(node.module or "", a.name) for a in node.names
        ):
            return True
        if isinstance(node, ast.Import) and any(is_forbidden(a.name, None) for a in node.names):
            return True
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_attribute and is_forbidden(node.value.id, node.attr):
            return True
    return False


def test_no_module_but_the_listed_ones_reaches_past_the_runtime() -> None:
    found = {name for name, tree in sources() if reaches_past(tree)}
    assert not found - ALLOWED.keys(), "take it from the runtime that is handed in"
    assert not ALLOWED.keys() - found, "these do not any more: strike them off the list"
    assert len(ALLOWED) <= MOST_ALLOWED


def test_what_reaches_past_is_seen_in_each_of_its_forms() -> None:
    for text in (
        "import uuid",
        "from time import sleep",
        "import time\ntime.monotonic()",
        "import zmq.asyncio",
    ):
        assert reaches_past(ast.parse(text)), text
    for text in ("import time\ntime.perf_counter()", "import threading\nthreading.get_ident()"):
        assert not reaches_past(ast.parse(text)), text


def test_every_client_server_and_journal_of_a_service_is_given_the_runtime_of_its_process() -> None:
    """Some can be built without, by a user's program; a service that did so would have a second runtime."""
    for name, tree in sources():
        if name == "asyncrl/planner" or name.startswith(("asyncrl/control", "asyncrl/cli")):
            continue  # they only read what a journal holds
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id in CONSTRUCTED:
                words = {part for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))}
                said = {one.id if isinstance(one, ast.Name) else one.attr for one in words}
                assert said & {"runtime", "_runtime", "ThreadRuntime"}, f"{name}:{node.lineno}"

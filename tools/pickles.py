"""Check against pickle and its like: fails on code that could run what it reads (standard library only).

`python tools/pickles.py FOLDER...` looks at imports, calls and names of every Python file. ruff's S301
sees `pickle.loads` alone; this sees the ways by which a pickle comes in under another name. A line that
must stand says why: `# unpickles: <reason>`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
"""Modules whose readers run code from their input. Ray's own use is trusted on a private interface."""
PROCESS_LINKS = {"multiprocessing.connection", "multiprocessing.managers", "xmlrpc", "Pyro4", "rpyc"}
"""Links between processes that pickle by themselves."""
METHODS = {
    "recv_pyobj": "ZMQ's pickles",
    "send_pyobj": "ZMQ's pickles",
    "send_serialized": "ZMQ's, with any serializer",
    "recv_serialized": "ZMQ's, with any serializer",
    "all_gather_object": "torch.distributed pickles objects",
    "gather_object": "torch.distributed pickles objects",
    "broadcast_object_list": "torch.distributed pickles objects",
    "scatter_object_list": "torch.distributed pickles objects",
    "send_object_list": "torch.distributed pickles objects",
    "recv_object_list": "torch.distributed pickles objects",
    "read_pickle": "pandas' pickles",
    "unsafe_load": "YAML that makes any object",
    "ProcessPoolExecutor": "it pickles what it passes on",
}
EXCUSE = "# unpickles: "


def find(path: Path) -> Iterator[str]:
    """Yield a sentence for each place in the Python file `path`."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text, str(path))):
        for what in _judge(node):
            last = getattr(node, "end_lineno", node.lineno)
            if not any(EXCUSE in line for line in lines[node.lineno - 1 : last]):
                yield f"{path}:{node.lineno}: {what}"


def _judge(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from _modules(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        names = [alias.name for alias in node.names]
        yield from _modules([module, *names, *(f"{module}.{name}" for name in names)])
        yield from _methods(alias.name for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield from _methods([node.attr])
    elif isinstance(node, ast.Call):
        yield from _call(node)


def _modules(names: Iterator[str] | Sequence[str]) -> Iterator[str]:
    for name in names:
        roots = {".".join(name.split(".")[:count]) for count in (1, 2)}
        if roots & (MODULES | PROCESS_LINKS):
            yield f"imports {name}, whose readers run what they read"
            return  # `from pickle import loads` is one finding


def _methods(names: Iterator[str] | Sequence[str]) -> Iterator[str]:
    yield from (f"{name}: {METHODS[name]}" for name in names if name in METHODS)


def _call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if name == "torch.load" and not _is(given.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if name.endswith("load") and _is(given.get("allow_pickle"), True):
        yield f"{name} with allow_pickle=True"
    if name == "yaml.load" and "Loader" not in given:
        yield "yaml.load without a safe Loader"
    if name in ("__import__", "import_module", "importlib.import_module") and node.args:
        module = node.args[0]
        if isinstance(module, ast.Constant) and isinstance(module.value, str):
            yield from _modules([module.value])


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def main(folders: Sequence[str]) -> int:
    """Print what was found; return 1 if that is anything."""
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    found = [sentence for path in paths for sentence in find(path)]
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    print(f"pickles: {len(paths)} files, {len(found)} places that could run what they read")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

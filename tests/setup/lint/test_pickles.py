"""The lint rule that no asyncrl process unpickles: what it catches, and that it is part of `make lint`."""

from pathlib import Path

import pickles
import pytest

ROOT = Path(__file__).resolve().parents[3]

PLANTED = {
    "import pickle": "imports pickle",
    "import pickle as p\np.loads(b'')": "imports pickle",
    "from pickle import loads": "imports pickle",
    "def f():\n    import marshal": "imports marshal",
    "import shelve": "imports shelve",
    "import cloudpickle": "imports cloudpickle",
    "from ray import cloudpickle": "imports cloudpickle",
    "from multiprocessing.connection import Listener": "imports multiprocessing.connection",
    "from multiprocessing import managers": "imports multiprocessing.managers",
    "import importlib\nimportlib.import_module('pickle')": "imports pickle",
    "__import__('dill')": "imports dill",
    "socket.recv_pyobj()": "recv_pyobj",
    "torch.load(path)": "torch.load without weights_only=True",
    "torch.load(path, weights_only=False)": "torch.load without weights_only=True",
    "torch.load(path, weights_only=flag)": "torch.load without weights_only=True",
    "np.load(path, allow_pickle=True)": "np.load with allow_pickle=True",
    "yaml.load(text)": "yaml.load without a safe Loader",
    "dist.all_gather_object(found, mine)": "all_gather_object",
    "from torch.distributed import broadcast_object_list": "broadcast_object_list",
    "from concurrent.futures import ProcessPoolExecutor": "ProcessPoolExecutor",
    "pandas.read_pickle(path)": "read_pickle",
}


def found_in(folder: Path, text: str) -> list[str]:
    (folder / "planted.py").write_text(text + "\n")
    return list(pickles.find(folder / "planted.py"))


@pytest.mark.parametrize("text", list(PLANTED))
def test_a_planted_line_that_could_run_what_it_reads_is_found(tmp_path, text, capsys):
    (found,) = found_in(tmp_path, text)
    assert PLANTED[text] in found
    assert pickles.main([str(tmp_path)]) == 1
    assert "planted.py:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "import json\njson.loads('{}')",
        "def read_pickles(): ...",
        "import pickle  # unpickles: what a peer does, with our own data",
    ],
)
def test_what_reads_plain_values_or_says_why_may_stand(tmp_path, text):
    assert found_in(tmp_path, text) == []


def test_nothing_of_ours_unpickles_and_lint_asks():
    packages = ("asyncrl", "configs", "learner", "rollout_service", "weight_sync", "tools")
    assert pickles.main([str(ROOT / package) for package in packages]) == 0
    makefile = (ROOT / "Makefile").read_text()
    lint = makefile.partition("\nlint:")[2].partition("\n\n")[0]
    assert "tools/pickles.py" in lint

"""Facts about a variant stand in its record: no other code of ours compares or lists names of variants."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping

import pytest

from asyncrl.core.variants import (
    backend_names,
    engine_names,
    estimators,
    journal_names,
    losses,
    rewards,
    sink_names,
)
from asyncrl.models.architectures import FAMILIES
from learner.algorithms.presets import make_corrections
from rollout_service.environments.registry import BUILT_IN as ENVIRONMENTS
from tests.setup.lint.test_circles import ROOT, find_modules
from tests.setup.lint.test_rooms import SHIPPED

NAMES = frozenset(
    {
        *(*estimators(), *losses(), *make_corrections(2.0), *rewards(), *ENVIRONMENTS, *FAMILIES),
        *(*journal_names(), *engine_names(), *backend_names(), *sink_names(), "delta"),
    }
)
REGISTRIES = {
    "asyncrl.models.architectures",
    "learner.algorithms.presets",
    "learner.algorithms.variants",
    "rollout_service.engine.sglang.windows",  # models that it refuses
    "rollout_service.environments.registry",
    "rollout_service.rewards.variants",
}
"""Modules of records, which list them. Journals, engines, backends and sinks are found by file."""
KEY, PYTHON = "the key `format` of a configuration", "Python's module in an expression"
ALLOWED: Mapping[tuple[str, str], str] = {
    ("asyncrl.cli.doctor.packages", "file"): "the scheme of a URL",
    ("asyncrl.cli.exits", "vllm"): "a package of Python",
    ("asyncrl.core.config.load", "format"): KEY,
    ("asyncrl.core.config.rules.format", "format"): KEY,
    ("asyncrl.core.config.sections.launcher", "delta"): "the section says once what its encoding means",
    ("weight_sync.backends.store", "file"): "the scheme of a URL",
    ("rollout_service.environments.tools.expression_child", "math"): PYTHON,
}
"""Comparisons that are none with a variant, or are its record: (module, name) and the reason."""
PAGES = {
    "algorithms": {*estimators(), *losses()},
    "environments": set(ENVIRONMENTS),
    "observability": set(sink_names()),
    "rewards": rewards().keys() - {"digit_sort"},  # of the built-in task alone
}


def find_compared(tree: ast.AST) -> Iterator[str]:
    """Yield each variant whose name is compared or matched, alone or as one of several."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from (name for side in (node.left, *node.comparators) for name in _names_in(side))
        elif isinstance(node, ast.MatchValue):
            yield from _names_in(node.value)


def find_listed(tree: ast.AST) -> Iterator[str]:
    """Yield the variants of each collection, or dictionary by key, that holds several and nothing else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            items = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            items = node.elts
        else:
            continue
        names = [name for item in items for name in _names_in(item)]
        if len(names) == len(items) > 1:
            yield from names


def _names_in(node: ast.AST) -> list[str]:
    items = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return [item.value for item in items if isinstance(item, ast.Constant) and item.value in NAMES]


def find_in_packages(find: Callable[[ast.AST], Iterator[str]]) -> set[tuple[str, str]]:
    """Return (module, variant) of what `find` yields of the shipped packages."""
    quoted = re.compile(f'"(?:{"|".join(sorted(NAMES))})"')
    modules = {name: path for name, path in find_modules(ROOT).items() if name.split(".")[0] in SHIPPED}
    assert len(modules) > 300, "this is the repository"
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    trees = {name: ast.parse(text) for name, text in texts.items() if quoted.search(text)}
    return {(name, variant) for name, tree in trees.items() for variant in find(tree)}


def test_no_variant_is_compared_by_name() -> None:
    assert find_in_packages(find_compared) == ALLOWED.keys()


def test_variants_are_listed_in_their_registry_alone() -> None:
    assert {name for name, _ in find_in_packages(find_listed)} == REGISTRIES


@pytest.mark.parametrize(
    ("find", "code"),
    [
        (find_compared, 'loss == "gspo"'),
        (find_compared, '"vtrace" != name'),
        (find_compared, 'fn in ("format", "other")'),
        (find_compared, 'match engine:\n    case "vllm":\n        pass'),
        (find_listed, 'SLOW = ("model", "math_verify")'),
        (find_listed, 'SINKS = {"wandb": WandbSink, "mlflow": MlflowSink}'),
    ],
)
def test_each_form_is_found(find: Callable[[ast.AST], Iterator[str]], code: str) -> None:
    assert list(find(ast.parse(code)))
    assert not list(find(ast.parse('name == "no variant" or record.needs in (VALUES, "greedy")')))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_every_variant(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert not {name for name in PAGES[page] if f"`{name}`" not in text}

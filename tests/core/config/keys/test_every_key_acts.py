"""Every key of the configuration is read by something besides the configuration itself.

A read is `<section>.<key>` (`config.rollout.gpus`, `rollout.gpus`), or an attribute of what a module that
names the section or its class calls `section` or `config`. Keys that are read under another name stand in
`OTHERWISE`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from asyncrl.cli.schema import walk

ROOT = Path(__file__).parents[4]
PACKAGES = ("asyncrl", "learner", "rollout_service", "weight_sync")
GENERIC = {"section", "_section", "config", "_config"}
LEAVES = {leaf.key: leaf for leaf in walk()}

OTHERWISE = {
    # read through a property of the section, which names what the key means
    "data.order": ("data", "curriculum"),
    "buffer.url": ("section", "redis_url"),
    "learner.dp": ("learner", "num_ranks"),
    "learner.lr_schedule": ("config", "min_lr_ratio"),
    "launcher.curve": ("launcher", "has_curve"),
    "rollout.engine": ("rollout", "engines"),
    "rollout.replicas.min": ("replicas", "start"),
    "rollout.prefix_caching": ("settings", "caches_prefixes"),
    "weight_sync.encoding": ("weight_sync", "uses_delta"),
    "guard.limits.*.max": ("limit", "as_written"),
    "guard.limits.*.min": ("limit", "as_written"),
    "guard.limits.*.min_share": ("limit", "as_written"),
    "guard.limits.*.max_times": ("limit", "as_written"),
    "guard.limits.*.over_steps": ("limit", "over_steps"),
    # items of a list, under the name of an item
    "data.train.*.path": ("source", "path"),
    "data.train.*.weight": ("source", "weight"),
    "data.train.*.filter": ("source", "filter"),
    "data.eval.*.path": ("source", "path"),
    "data.eval.*.weight": ("source", "weight"),
    "data.eval.*.filter": ("source", "filter"),
    "reward.fn.*.fn": ("entry", "fn"),
    "reward.fn.*.weight": ("entry", "weight"),
    "reward.fn.*.name": ("entry", "name"),
    "metrics.sinks.*.name": ("sink", "name"),
    "metrics.sinks.*.arguments": ("sink", "arguments"),
}
"""A key, and the (owner, attribute) that stands for it where it is used."""
BY_THE_READER = {
    "format": "asyncrl.core.config.rules.format refuses newer files and brings older ones up to date"
}


def modules():
    """Yield the code that could use a configuration: not itself, and not the plan, which only shows it."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            if parts[:3] not in (("asyncrl", "core", "config"), ("asyncrl", "planner", "plan")):
                yield path


def owner_of(node):
    value = node.value
    return value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""


@pytest.fixture(scope="module")
def reads():
    """Every (owner, attribute) that is read, and the names that each module which reads it knows."""
    found = defaultdict(list)
    for path in modules():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found[owner_of(node), node.attr].append(names)
    return found


def is_read(leaf, reads):
    if leaf.key in OTHERWISE:
        return OTHERWISE[leaf.key] in reads
    *_, word, name = leaf.key.split(".")
    if any((owner, name) in reads for owner in (word, f"_{word}")):
        return True
    knowing = (names for owner in GENERIC for names in reads.get((owner, name), ()))
    return any(names & {word, leaf.section.__name__} for names in knowing)


@pytest.mark.parametrize("key", sorted(LEAVES.keys() - BY_THE_READER.keys()))
def test_every_key_is_read_by_what_it_is_for(key, reads):
    assert is_read(LEAVES[key], reads), f"nothing reads {key}: wire it, or take it out of the tree"


def test_what_is_observed_otherwise_is_still_a_key():
    assert (OTHERWISE.keys() | BY_THE_READER.keys()) - LEAVES.keys() == set()


def test_a_key_that_nothing_reads_would_be_seen(reads):
    leaf = LEAVES["learner.lr"]
    assert not is_read(type(leaf)("learner.momentum", leaf.section, leaf.field, leaf.note), reads)

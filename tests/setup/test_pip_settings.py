import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pip_settings import parse_pip_settings, uv_environment


def test_the_environment_wins_over_install_and_install_over_global():
    lines = [
        ":env:.find-links='e'",
        "global.find-links='g'",
        "global.cert='g'",
        "install.cert='i'",
        "freeze.cert='of another command'",
        "not a setting",
    ]
    assert parse_pip_settings(lines) == {"find-links": "e", "cert": "i"}


def test_several_values_get_uv_s_separators():
    settings = parse_pip_settings(["global.find-links='\\na\\n  b'", "global.extra-index-url='c  d'"])
    environment = uv_environment(settings, {})
    assert environment["UV_FIND_LINKS"] == "a,b"
    assert environment["UV_EXTRA_INDEX_URL"] == "c d"


def test_pip_s_way_of_choosing_among_indexes_is_kept():
    assert uv_environment({}, {}) == {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_one_valued_settings_are_handed_over():
    environment = uv_environment({"index-url": "i", "cert": "c", "no-index": "true", "color": "x"}, {})
    assert {name: environment[name] for name in ("UV_INDEX_URL", "SSL_CERT_FILE", "UV_NO_INDEX")} == {
        "UV_INDEX_URL": "i",
        "SSL_CERT_FILE": "c",
        "UV_NO_INDEX": "true",
    }
    assert "x" not in environment.values()


def test_what_the_user_gave_to_uv_stays():
    assert uv_environment({"index-url": "pip's"}, {"UV_INDEX_URL": "uv's"})["UV_INDEX_URL"] == "uv's"


def test_lists_hold_names_and_versions_only():
    for name in ("cpu", "gpu"):
        lines = (Path("requirements") / f"{name}.txt").read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert all(line.count("==") == 1 and not set(" /@:\\;").intersection(line) for line in pins)
        assert any(line.startswith("setuptools==") for line in pins)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_list_pins_whatever_the_project_asks_for_to_a_version_that_it_takes(name):
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = Path("requirements", f"{name}.txt").read_text().splitlines()
    assert lines[1:] == sorted(lines[1:], key=lambda line: line.split("==")[0])
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for text in [*project["dependencies"], *extras[name], *extras["dev"]]:
        asked = Requirement(text)
        version = pins.get(canonicalize_name(asked.name))
        assert version is not None and asked.specifier.contains(version), text


def test_the_cpu_list_has_no_cuda_package():
    names = [line.split("==")[0] for line in Path("requirements/cpu.txt").read_text().splitlines()]
    assert not [name for name in names if name.startswith(("nvidia-", "triton", "torchvision", "cuda-"))]

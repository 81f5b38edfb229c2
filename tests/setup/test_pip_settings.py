import re
import tomllib
from pathlib import Path

import lock
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


def pins_of(name: str) -> dict[str, str]:
    """Return the versions of a list by name; assert that it holds names, versions and hashes only."""
    text = Path("requirements", f"{name}.txt").read_text()
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    pins = re.findall(PIN, text, re.MULTILINE)
    assert "".join(re.sub(PIN, "", text, flags=re.MULTILINE).split()) == "", "a line is no pin"
    return dict(pins)


PIN = r"^([a-z0-9][a-z0-9-]*)==([a-z0-9.+]+)(?: \\\n    --hash=sha256:[0-9a-f]{64})+$"


def test_lists_hold_names_versions_and_the_hashes_of_each():
    assert all("setuptools" in pins_of(name) for name in ("cpu", "gpu"))
    assert list(pins_of("uv")) == ["uv"]


def test_a_list_is_made_from_one_index():
    settings = {"index-url": "one", "extra-index-url": "two three", "find-links": "folder"}
    environment = lock.of_one_index(uv_environment(settings, {}))
    assert (environment["UV_INDEX_URL"], environment["UV_EXTRA_INDEX_URL"]) == ("one", "")
    assert (environment["UV_INDEX_STRATEGY"], environment["UV_FIND_LINKS"]) == ("first-index", "folder")


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_list_pins_whatever_the_project_asks_for_to_a_version_that_it_takes(name):
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = pins_of(name)
    assert list(pins) == sorted(pins)
    for text in [*project["dependencies"], *extras[name], *extras["dev"]]:
        asked = Requirement(text)
        version = pins.get(canonicalize_name(asked.name))
        assert version is not None and asked.specifier.contains(version), text


def test_the_cpu_list_has_no_cuda_package():
    assert not [
        name for name in pins_of("cpu") if name.startswith(("nvidia-", "triton", "torchvision", "cuda-"))
    ]

"""README and docs: their examples run, their links lead somewhere, what is generated is current."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import typer.main

from asyncrl.cli.app import app
from asyncrl.core.config.load import load_config
from asyncrl.planner.plan.footprint.shared_memory import count_weights
from asyncrl.planner.plan.prepare import BUILTIN, BUILTINS, make_builtin
from rollout_service.tasks.tiny_text import build_tokenizer
from tests.buffer.journals.redis.redis_parts import free_port
from tests.cli.commands.calling import asyncrl
from tests.docs.pages import ROOT, YOUR_OWN, commands_of, run, write_files
from tests.rollout.data.files import load_prompts

README = ROOT / "README.md"
PACKAGES = ("asyncrl", "learner", "rollout_service", "weight_sync")
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run_page(name: str, folder: Path) -> list[str]:
    """Write the files of a page, run its commands in order, and return what they printed."""
    page = YOUR_OWN / f"{name}.md"
    write_files(page, folder)
    for file in folder.glob("*.yaml"):  # a gateway's port may be taken
        file.write_text(file.read_text().replace("port: 8100", f"port: {free_port()}"))
    commands = commands_of(page)
    assert commands
    return [run(command, folder) for command in commands]


def test_the_data_files_of_the_page_are_read_as_it_says(tmp_path: Path):
    run_page("data", tmp_path)
    tokenizer = build_tokenizer()
    names = ("text.jsonl", "chat.jsonl", "answers.jsonl", "sums.parquet")
    text, chat, answers, sums = (load_prompts(tmp_path / name, tokenizer, 512).prompts for name in names)
    assert tokenizer.decode(text[0].token_ids) == "12 + 30 ="
    assert "<|im_start|>assistant" in tokenizer.decode(chat[0].token_ids)
    assert answers[0].prompt.ground_truth == ["2", "3", "5", "7"]
    assert (answers[1].prompt.data_source, answers[1].prompt.extra_info) == ("even", {"level": 2})
    assert len(sums) == 100 and sums[-1].prompt.ground_truth == "18"


def test_the_reward_of_the_page_gives_the_scores_that_it_names(tmp_path: Path):
    run_page("reward", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert [line["score"] for line in lines] == [1.1, 1.0, 0.1]
    assert "here 1.1, 1.0 and 0.1" in (YOUR_OWN / "reward.md").read_text()


@pytest.mark.long
def test_the_model_of_the_page_is_one_that_a_plan_accepts(tmp_path: Path):
    *_, plan = run_page("model", tmp_path)
    size = (tmp_path / "small_model" / "model.safetensors").stat().st_size
    assert "weights" in plan and size > 100_000


def test_the_agent_of_the_page_is_a_module_and_its_configuration_a_run(tmp_path: Path):
    """`tests/rollout/gateway/test_gateway.py` has it speak with a real model."""
    run_page("agent", tmp_path)
    agent = runpy.run_path(str(tmp_path / "agent.py"))
    assert agent["use_tool"]('{"name": "add", "arguments": {"a": 12, "b": 30}}') == "42"
    assert "error" in agent["use_tool"]("no JSON")


def test_the_readme_is_short_and_its_example_is_a_configuration_with_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert len(README.read_text().splitlines()) <= 70
    write_files(README, tmp_path)
    lines = (tmp_path / "cluster.yaml").read_text().splitlines()
    config = load_config(tmp_path / "cluster.yaml")
    assert (len(lines), config.staleness.max_lag) == (9, 4)
    monkeypatch.chdir(tmp_path)
    done = asyncrl("plan", "cluster.yaml", "--elsewhere")
    assert done.code == 0 and "not checked" in done.out, done.err
    score = runpy.run_path(str(tmp_path / "my_reward.py"))["score"]
    assert (score("It is 42", "42"), score("It is 41", "42")) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("pattern", "sigma"),
    [(r"\*\*([\d.]+) times the trained tokens", 1.0), (r"the same length: the gain .* ([\d.]+) times", 0.0)],
)
def test_the_numbers_of_the_readme_are_those_of_the_stored_rows(pattern: str, sigma: float):
    (claim,) = re.findall(pattern, README.read_text())
    rows = json.loads((ROOT / "benchmarks/results/pipeline-2026-11-22.json").read_text())["rows"]
    wanted = {"engine": "real", "sigma": sigma, "way": "max_lag 4", "stream": 0}
    (row,) = [row for row in rows if row["case"].items() >= wanted.items()]
    assert claim == f"{row['values']['trained_speed_up_over_disaggregated']:.1f}"


def test_the_size_that_pages_name_is_that_of_the_largest_built_in_model(tmp_path: Path):
    made = (make_builtin(f"{BUILTIN}{name}", tmp_path, print) for name in BUILTINS)
    largest = f"{max(count_weights(str(folder)) or 0 for folder in made) / 1e6:.2f} M parameters"
    assert f"({largest};" in README.read_text()
    assert largest in (ROOT / "docs" / "features.md").read_text()


def test_the_picture_of_the_architecture_is_current():
    drawn = runpy.run_path(str(ROOT / "tools" / "draw_architecture.py"))["draw"]()
    told = "run: python tools/draw_architecture.py > docs/architecture.svg"
    assert (ROOT / "docs" / "architecture.svg").read_text() == drawn, told


GENERATED = {
    ROOT / "docs" / f"{name}.md" for name in ("benchmarks", "cli", "configuration", "families", "metrics")
}
TEXTS = sorted((ROOT / "benchmarks" / "results" / "texts").glob("*.md"))
MAX_WORDS = 30_000


def count_words(page: Path) -> int:
    """Return the words with a letter of a page, without fenced blocks, comments and targets of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return sum(bool(re.search("[A-Za-z]", word)) for word in re.sub(r"\]\(\S+\)", "]", text).split())


def test_the_pages_that_people_write_have_few_words():
    """The texts of docs/benchmarks.md count, its stored rows do not; CHANGELOG.md is a record."""
    written = [page for page in PAGES if page not in GENERATED]
    assert sum(count_words(page) for page in [*written, *TEXTS]) <= MAX_WORDS


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_every_command_that_a_page_names_exists():
    commands = typer.main.get_command(app).commands
    for page in PAGES:
        blocks = re.findall(r"^```.*?^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for verb in re.findall(r"^(?:\.venv/bin/)?asyncrl ([a-z]+)\b", "\n".join(blocks), re.MULTILINE):
            assert verb in commands, f"{page}: asyncrl {verb}"


NOT_OURS = ("operator torchvision::nms", "No space left on device", "max_lag: 0")


def test_every_message_that_troubleshooting_quotes_is_one_of_the_code():
    files = (path.read_text() for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    code = re.sub(r'"\s*f?"', "", "\n".join(files))  # literals over several lines
    symptoms = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [text for symptom in symptoms for text in re.findall(r"`([^`]+)`", symptom)]
    parts = [part.strip(" []") for text in quoted for part in re.split(r"…|\bN\b|==", text)]
    wanted = [part for part in parts if " " in part and not part.startswith(NOT_OURS)]
    assert len(wanted) >= 8
    assert [part for part in wanted if part not in code] == []


def test_no_page_and_no_message_installs_asyncrl_from_an_index():
    pattern = re.compile(r"(pip|uv)3? (add|install)[^\n`]*(?<![\w./-])asyncrl(?![\w/])")
    code = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert [str(path) for path in [*PAGES, *code] if pattern.search(path.read_text())] == []


FOLDERS = "asyncrl|benchmarks|configs|learner|research|rollout_service|tests|tools|weight_sync"
RUN_MODULE = re.compile(
    r"python -m ((?:asyncrl|benchmarks|research|tests|learner|rollout_service|weight_sync)[\w.]*)"
)
NAMED_PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")


def test_every_path_that_a_page_names_exists():
    named = [(page.name, path) for page in PAGES for path in NAMED_PATH.findall(page.read_text())]
    assert len(named) > 60
    assert not [(page, path) for page, path in named if not (ROOT / path).exists()]


def test_every_module_that_a_page_runs_does_something_when_it_is_run():
    named = {name for page in PAGES for name in RUN_MODULE.findall(page.read_text())}
    named |= set(RUN_MODULE.findall((ROOT / "research" / "README.md").read_text()))
    assert len(named) > 10
    for name in named:
        path = ROOT / name.replace(".", "/")
        main = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert main.exists(), name
        assert path.is_dir() or 'if __name__ == "__main__"' in main.read_text(), name

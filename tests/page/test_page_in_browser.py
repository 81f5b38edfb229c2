"""The page in a real browser, from a real server, with a run that looks real and with one that is hostile."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_browser
from page_runs import EVIL, make_config, make_snapshot, write_groups, write_rows

from asyncrl.control.api.access import page_url
from asyncrl.control.api.server import ControlApi
from asyncrl.control.snapshot import Snapshot
from asyncrl.page.http.routes import page_routes
from tests.statuses import snapshot_of

EXECUTABLE = find_browser()
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="there is no chromium on this machine")


def visit(
    folder: Path, snapshot: Callable[[], Snapshot], look: Callable[[Browser, str], Awaitable[None]]
) -> None:
    """Serve the run in `folder / "run"` and look at its page."""
    routes = page_routes(snapshot, make_config(folder / "run"), folder / "run")
    api = ControlApi(0, "key", routes)

    async def open_and_look() -> None:
        assert EXECUTABLE is not None
        async with Browser(EXECUTABLE, folder / "profile") as browser:
            await look(browser, page_url(api.url, "key"))
            assert browser.said == [], "the console has errors"

    try:
        asyncio.run(open_and_look())
    finally:
        api.close()


LONG_NAMES = {
    "weight_sync.0": {"state": "STARTING", "heartbeat_age_s": 100.0, "restarts": 12},
    "rollout.10": {"state": "READY", "standby": True, "version": 1231, "heartbeat_age_s": 0.2, "restarts": 0},
    "rollout.11": {"state": "RETIRED", "version": 1189, "heartbeat_age_s": 100.0, "restarts": 12},
}
"""Services whose names, states and figures are long."""


def text_of(selector: str) -> str:
    return f"document.querySelector('{selector}').innerText"


def test_the_page_shows_a_run_on_a_desk_a_phone_and_in_the_dark(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_rows(tmp_path / "run")
    write_groups(tmp_path / "run")
    away = {"service": "buffer.0", "cause": "journal_away", "reason": "Redis is away", "count": 1}
    state: dict[str, Any] = {"state": "running", "obstacles": [away | {"since": 0.0, "blocks": True}]}

    async def look(browser: Browser, url: str) -> None:
        await browser.show(url, 1280, 900)
        await browser.wait_for("document.querySelectorAll('.rollout').length")
        boxes = await browser.ask("[...document.querySelectorAll('.node')].map(one => one.dataset.node)")
        assert boxes == ["prompts", "replicas", "buffer", "learner", "weights"]
        assert "1/2" in await browser.ask(text_of('[data-node="replicas"]'))
        assert await browser.ask("document.querySelector('.node.bottleneck').dataset.node") == "replicas"
        assert "Generation is slower than training" in await browser.ask(text_of("#bottleneck"))
        assert await browser.ask(text_of("#residue")) == "residue 0"
        assert "dropped: stale 5" in await browser.ask(text_of("#laws"))
        assert await browser.ask("document.querySelectorAll('.bars .bar').length") == 5
        assert "rollout.1" in await browser.ask(text_of("tr.replica:nth-child(2)"))
        assert "Redis is away." in await browser.ask(text_of("#obstacles"))
        assert "kl_spike at step 188" in await browser.ask(text_of("#events"))
        assert await browser.ask("document.querySelectorAll('.chart path.curve').length") == 10
        assert await browser.ask("document.querySelectorAll('[data-chart=Reward] .dot').length") == 9
        assert await browser.ask(text_of(".rollout .prompt")) == "51937="
        assert "13579</s>" in await browser.ask(text_of(".rollout .answer"))
        await check_zoom(browser)
        state["services"] = make_snapshot()["services"] | LONG_NAMES
        await browser.wait_for(f"{text_of('#services')}.includes('RETIRED')")
        await check_shapes(browser)
        assert await browser.ask("location.href") == url.partition("?")[0], "the token is out of sight"
        await browser.call("Page.reload")
        await browser.wait_for("document.querySelectorAll('.node').length === 5")  # by its cookie
        state["state"] = "finished"
        await browser.wait_for(f"{text_of('#link')} === 'the run has ended'")
        assert (await browser.ask(text_of("#bottleneck"))).strip() == "The run has finished."
        assert await browser.ask("document.querySelectorAll('.edge.moving, .node.bottleneck').length") == 0

    visit(tmp_path, lambda: snapshot_of(make_snapshot() | state), look)


async def check_zoom(browser: Browser) -> None:
    """Curves are smoothed over what was measured; a drag over one zooms into all, a click shows all again."""
    assert await browser.ask("document.querySelectorAll('.chart path.raw').length") == 10
    drag = """(() => {
      const svg = document.querySelector('[data-chart=Lag] svg'), box = svg.getBoundingClientRect();
      const at = (name, share) => svg.dispatchEvent(new PointerEvent(name, {
        clientX: box.left + 44 + share * (box.width - 52), clientY: box.top + 60, bubbles: true}));
      at('pointermove', 0.25); at('pointerdown', 0.25); at('pointermove', 0.75); at('pointerup', 0.75);
      return document.getElementById('unzoom').innerText;
    })()"""
    first_step = "document.querySelector('[data-chart=Entropy] text[text-anchor=start]').textContent"
    assert await browser.ask(first_step) == "step 1"
    zoomed = re.fullmatch(r"steps (\d+) to (\d+): show all", await browser.ask(drag))
    assert zoomed and 55 <= int(zoomed[1]) <= 61 and 170 <= int(zoomed[2]) <= 176  # a pixel is half a step
    assert await browser.ask(first_step) == f"step {zoomed[1]}", "the other charts show the same steps"
    await browser.ask("document.getElementById('unzoom').click()")
    assert await browser.ask(first_step) == "step 1"
    await browser.ask("document.getElementById('smooth').click()")
    assert await browser.ask("document.querySelectorAll('.chart path.raw').length") == 0


async def check_shapes(browser: Browser) -> None:
    """On a phone nothing is wider than the screen; in the dark the paper is dark; and the other way round."""
    too_wide = "document.documentElement.scrollWidth > innerWidth"
    brightness = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
        ".reduce((sum, one) => sum + one) / 765"
    )
    columns = (
        "new Set([...document.querySelectorAll('.node')].map(one => one.getBoundingClientRect().left)).size"
    )
    assert not await browser.ask(too_wide) and await browser.ask(columns) == 5
    assert await browser.ask(brightness) > 0.9
    await browser.resize(360, 740, "dark")
    assert not await browser.ask(too_wide) and await browser.ask(columns) == 1
    is_cut = "(box => box.scrollWidth > box.clientWidth)(document.querySelector('.scroll'))"
    assert not await browser.ask(is_cut), "the table of services is cut"
    last = "document.querySelector('tr.replica:nth-child(2) td:last-child')"
    assert await browser.ask(f"{last}.getBoundingClientRect().right <= innerWidth") is True
    assert "restarts" in await browser.ask(f"getComputedStyle({last}, '::before').content")
    assert await browser.ask(brightness) < 0.15


def test_what_a_model_or_a_name_says_is_never_markup(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_groups(tmp_path / "run", words=[f"{place}{EVIL}" for place in range(14)])
    snapshot = make_snapshot(name=EVIL)
    snapshot["events"][0]["text"] = snapshot["bottleneck"]["why"] = snapshot["error"] = EVIL
    snapshot["services"][EVIL] = {"state": "READY"}
    snapshot["obstacles"] = [{"service": "buffer.0", "reason": EVIL, "count": 1, "blocks": True}]
    snapshot["ledger"]["dropped"] = {EVIL: 3}

    async def look(browser: Browser, url: str) -> None:
        await browser.show(url, 800, 600)
        await browser.wait_for("document.querySelectorAll('.rollout').length")
        assert await browser.ask(text_of(".rollout .prompt")) == "".join(
            f"{place}{EVIL}" for place in (7, 3, 11, 5, 9, 12)
        )
        for selector in ("#run", "#error", "#bottleneck", "#obstacles", "#laws", "#services", "#events"):
            assert EVIL in (await browser.ask(text_of(selector))).replace("<Img", "<img"), selector
        assert await browser.ask("document.querySelectorAll('main img, main script, [onerror]').length") == 0
        assert "owned" not in (await browser.ask("document.title")).partition(" ")[0]
        refused = "(() => { try { document.body.innerHTML = '<b>x</b>' } catch (e) { return e.name } })()"
        assert await browser.ask(refused) == "TypeError", "the policy forbids markup from strings"
        browser.said.clear()  # of the refusal just now

    visit(tmp_path, lambda: snapshot_of(snapshot), look)


@pytest.mark.long
def test_a_page_finds_its_run_again_after_the_server_was_away(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    routes = page_routes(
        lambda: snapshot_of(make_snapshot()), make_config(tmp_path / "run"), tmp_path / "run"
    )
    first = ControlApi(0, "key", routes)
    port = int(first.url.rpartition(":")[2])
    servers: list[ControlApi] = []

    async def look() -> None:
        assert EXECUTABLE is not None
        async with Browser(EXECUTABLE, tmp_path / "profile") as browser:
            await browser.show(page_url(first.url, "key"), 800, 600)
            await browser.wait_for(f"{text_of('#link')} === 'live'")
            await asyncio.to_thread(first.close)
            await browser.wait_for(f"{text_of('#link')} !== 'live'")
            servers.append(ControlApi(port, "key", routes))
            await browser.wait_for(f"{text_of('#link')} === 'live'")

    try:
        asyncio.run(look())
    finally:
        for server in servers:
            server.close()

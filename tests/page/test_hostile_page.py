"""The page in a real browser while others word what it shows, not in markup alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from page_runs import EVIL, make_snapshot, write_rows
from test_page_in_browser import EXECUTABLE, visit

from tests.statuses import snapshot_of

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="there is no chromium on this machine")
HOSTILE = {
    "markup": EVIL,
    "right to left": "\u202egnorw\u2066 \u05d0\u05d1\u05d2",
    "control characters": "a\x00b\x07\x1b[2J\x7f\u0085c",
    "half a pair": "\ud83d and \udcff",
    "marks": "e" + "\u0301" * 400,
    "very long": "W" * 20_000,
    "a newline and the end of an event": "x\r\n\r\nevent: view\ndata: {}\n\n",
}

TOO_WIDE = """document.documentElement.scrollWidth <= innerWidth ? '' :
  [...document.querySelectorAll('body *')].filter(one => one.getBoundingClientRect().right > innerWidth)
    .map(one => one.outerHTML.slice(0, 90)).join()"""


def fill(snapshot: dict[str, Any], text: str) -> None:
    """Put `text` into every place of the snapshot that somebody outside words."""
    snapshot["events"] = [{"time": 0.0, "kind": text, "service": text, "text": text}]
    snapshot["bottleneck"] = {"who": text, "why": text, "learner_waits_for": text}
    snapshot["services"][text] = {"state": "READY", "version": 1, "heartbeat_age_s": 0.1, "gateway": text}
    snapshot["obstacles"] = [{"service": text, "reason": text, "count": 2, "blocks": True}]
    snapshot["ledger"]["dropped"] = {text: 3}
    snapshot["ledger"]["journal"] = {"kind": "redis", "redis": text, "losses": [text]}
    snapshot["metrics"][text] = 1.0
    snapshot["torn"] = [text]
    snapshot["phase"] = snapshot["error"] = snapshot["folder"] = text


def test_whatever_others_word_the_page_stays_whole(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_rows(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as rows:
        for text in HOSTILE.values():
            named = {"training/global_step": 232, f"val-core/{text}/acc/mean@1": 0.5, text: 1.0}
            rows.write(json.dumps(named) + "\n")
    snapshot = make_snapshot()
    raw = r"/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ud800-\udfff]/"

    async def look(browser: Browser, url: str) -> None:
        for kind, text in HOSTILE.items():
            fill(snapshot, text)
            await browser.show(url, 800, 600)
            await browser.wait_for("document.querySelectorAll('#events li, #events tr').length")
            assert await browser.ask(TOO_WIDE) == "", kind
            assert await browser.ask("document.querySelectorAll('main img, main script').length") == 0, kind
            assert not await browser.ask(f"{raw}.test(document.body.innerText)"), kind

    visit(tmp_path, lambda: snapshot_of(snapshot), look)

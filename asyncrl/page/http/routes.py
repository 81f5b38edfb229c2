"""Read-only routes of the control API: the page's files, stream and services, `/metrics` and `/health`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from asyncrl.buffer.journals.kind import journal_kind
from asyncrl.control.api.server import EventStream, Route, Text
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.snapshot import Snapshot
from asyncrl.core.config.tree import Config
from asyncrl.page.feed import Feed
from asyncrl.page.http.prometheus import CONTENT_TYPE, health_answer, prometheus_text
from asyncrl.page.reading import RowTail
from asyncrl.page.rollouts import decoder_of
from asyncrl.page.view import view_of

log = logging.getLogger(__name__)

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
"""The page runs its own script alone, fetches from its own run alone, and cannot make markup of a text."""
ASSETS = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}


def page_routes(snapshot: Callable[[], Snapshot], config: Config, folder: Path) -> dict[str, Route]:
    """Return the routes of the page of the run in `folder`; `snapshot` returns what it is doing."""
    feed = Feed(
        snapshot,
        RowTail(RunDir(folder).metrics),
        journal_kind(config.buffer.journal).newest(config.buffer, folder),
        lambda: decoder_of(Path(config.model.path), log.warning),
    )
    routes: dict[str, Route] = {f"GET {path}": _asset(*asset) for path, asset in ASSETS.items()}
    return routes | {
        "GET /events": lambda _: EventStream(feed.follow),
        "GET /services": lambda _: _services(snapshot()),
        "GET /metrics": lambda _: _metrics(snapshot()),
        "GET /health": lambda _: _health(snapshot()),
    }


def _services(snapshot: Snapshot) -> Text:
    return Text("application/json", json.dumps(view_of(snapshot, is_whole=True)["services"]).encode())


def _metrics(snapshot: Snapshot) -> Text:
    return Text(CONTENT_TYPE, prometheus_text(snapshot, snapshot.metrics).encode())


def _health(snapshot: Snapshot) -> Text:
    code, body = health_answer(snapshot)
    return Text("application/json", json.dumps(body).encode(), code=code)


def _asset(name: str, content_type: str) -> Route:
    body = files("asyncrl.page").joinpath(name).read_bytes()
    text = Text(content_type, body, {"Content-Security-Policy": POLICY})
    return lambda _: text

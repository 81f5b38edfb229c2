"""A headless Chromium, spoken to over its own debugging socket."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_S = 60.0
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-port=0",
]


def find_browser() -> str | None:
    """Return a Chromium that can use a profile of ours; a snap has a /tmp of its own."""
    found = filter(None, map(shutil.which, NAMES))
    return next((one for one in found if not _is_snap(Path(one))), None)


def _is_snap(path: Path) -> bool:
    with path.open("rb") as file:
        return path.resolve().name == "snap" or b"/snap/bin" in file.read(4096)


class Browser:
    """One tab. Use it as a context manager; `said` holds errors that the page's console was told of."""

    def __init__(self, executable: str, profile: Path) -> None:
        self._profile = profile
        command = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._num_calls = 0
        self.said: list[Any] = []

    async def __aenter__(self) -> Browser:
        async with asyncio.timeout(DEADLINE_S):
            port = await self._read_port()
            self._session = aiohttp.ClientSession()
            tabs = await (await self._session.get(f"http://127.0.0.1:{port}/json")).json()
            url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            self._socket = await self._session.ws_connect(url, max_msg_size=0)
            for domain in ("Runtime", "Log", "Page"):
                await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.call("Browser.close")
        await self._session.close()
        try:
            self._process.wait(60.0)
        finally:
            self._process.kill()
            self._process.wait()

    async def _read_port(self) -> str:
        path = self._profile / "DevToolsActivePort"
        while not path.exists() or len(path.read_text().split()) < 2:
            assert self._process.poll() is None, "the browser ended at once"
            await asyncio.sleep(0.05)
        return path.read_text().split()[0]

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_calls += 1
        await self._socket.send_json({"id": self._num_calls, "method": method, "params": params})
        while True:
            answer = await self._socket.receive_json(timeout=DEADLINE_S)
            if answer.get("id") == self._num_calls:
                return answer.get("result", {})
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.said.append(answer["params"])

    async def show(self, url: str, width: int, height: int, scheme: str = "light") -> None:
        """Load a page in a window of that many pixels."""
        await self.resize(width, height, scheme)
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int, scheme: str) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        preference = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[preference])

    async def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """Return the first value of an expression that is true."""
        async with asyncio.timeout(DEADLINE_S):
            while not (value := await self.ask(expression)):
                await asyncio.sleep(0.05)
        return value

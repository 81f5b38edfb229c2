"""Drawing of the architecture: `python tools/draw_architecture.py > docs/architecture.svg`.

Standard library only. The picture has its own background and follows the colour scheme of the reader, so
that it can be read on light and dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape

WIDTH, HEIGHT = 900, 400
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de }
  .box { fill: #eef4fb; stroke: #3c6ea5; stroke-width: 1.5 }
  .bar { fill: #f3f4f6; stroke: #8b949e; stroke-width: 1.5 }
  .title { fill: #10243e; font-weight: 600; font-size: 17px }
  .line, .label { fill: #33415c; font-size: 13px }
  .label { font-style: italic }
  .arrow { stroke: #b35900; stroke-width: 2; fill: none }
  .head { fill: #b35900 }
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #30363d }
    .box { fill: #16263a; stroke: #6ea8e5 }
    .bar { fill: #1c2128; stroke: #768390 }
    .title { fill: #e6edf3 }
    .line, .label { fill: #c3cdd9 }
    .arrow { stroke: #f0a35e }
    .head { fill: #f0a35e }
  }
"""
HEAD = (
    '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 0 L10 5 L0 10 z"/></marker>'
)


def box(x: int, y: int, width: int, height: int, title: str, lines: Sequence[str], kind: str = "box") -> str:
    """Return a rectangle with a title and lines below it, at (`x`, `y`) from the top left."""
    middle = x + width // 2
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>']
    parts.append(text(middle, y + 26, title, "title"))
    parts += [text(middle, y + 50 + 20 * row, line, "line") for row, line in enumerate(lines)]
    return "\n".join(parts)


def text(x: int, y: int, words: str, kind: str) -> str:
    """Return a line of text centred at `x`."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="middle">{escape(words)}</text>'


def arrow(path: str, labels: Iterable[tuple[int, int, str]]) -> str:
    """Return an arrow along an SVG path, and its labels as (x, y, words)."""
    drawn = f'<path class="arrow" d="{path}" marker-end="url(#head)"/>'
    return "\n".join([drawn, *(text(x, y, words, "label") for x, y, words in labels)])


def draw() -> str:
    """Return the picture as SVG."""
    replicas = ("vLLM engine", "episode: turns, tools, agents", "reward")
    buffer = ("ledger: leases, staleness bound", "journal: file or Redis", "each group counted once")
    learner = ("Megatron-core or FSDP2", "correction per token,", "lag asserted in the loss")
    sync = (
        "publisher: shared memory · receivers: staged, verified by digest",
        "NCCL or gloo; deadlines on every wait",
    )
    parts = [
        f'<rect class="page" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10"/>',
        *(f'<rect class="box" x="{30 + o}" y="{50 - o}" width="220" height="120" rx="8"/>' for o in (12, 6)),
        box(30, 50, 220, 120, "Rollout replicas 1…N", replicas),
        box(350, 50, 220, 120, "Experience buffer", buffer),
        box(660, 50, 210, 120, "Learner ranks", learner),
        box(215, 235, 480, 84, "Weight sync", sync),
        box(
            30,
            345,
            840,
            40,
            "Supervisor on Ray: starts, watches, repairs and scales every service",
            (),
            "bar",
        ),
        arrow("M262 85 H348", [(306, 76, "groups")]),
        arrow("M350 140 H264", [(306, 160, "prompts,"), (306, 176, "leases")]),
        arrow("M570 110 H658", [(614, 101, "batch"), (614, 130, "of a step")]),
        arrow("M765 170 V277 H697", [(820, 228, "new version")]),
        arrow("M215 277 H140 V172", [(78, 222, "swap with"), (78, 240, "requests"), (78, 258, "in flight")]),
    ]
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    title = "<title>asyncrl: rollout replicas, experience buffer, learner and weight sync in a loop</title>"
    body = "\n".join(parts)
    return f"{start}\n{title}\n<style>{STYLE}</style>\n<defs>{HEAD}</defs>\n{body}\n</svg>\n"


if __name__ == "__main__":
    sys.stdout.write(draw())

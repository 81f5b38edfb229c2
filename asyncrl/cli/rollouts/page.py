"""A sheet of answers as one HTML file that needs nothing else (pure).

Invariant: nothing that a model, a prompt or a reward wrote becomes markup; the page runs no script and
fetches nothing, and says so to the browser.
"""

from __future__ import annotations

from html import escape

from asyncrl.cli.rollouts.fates import CUT, OBSERVED, OVER_AGE
from asyncrl.cli.rollouts.pieces import NUM_SHADES, SHADE_BOUNDS, Piece, badge_of
from asyncrl.cli.rollouts.sheet import Entry, Sheet, fate_line_of, headline_of, masks_line_of
from asyncrl.core.files.printable import printable

CLASSES = {OBSERVED: "observation", CUT: "cut", OVER_AGE: "age"}
HUES = {shade: round(130 - 130 * (shade - 1) / (NUM_SHADES - 2)) for shade in range(1, NUM_SHADES)}
"""From green to red; shade 0 has no colour."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fbfbfa; --line: #d4d6da; --faint: #686d76; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #16181c; --line: #3a3e46; --faint: #9aa0aa; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.2rem; } h2 { font-size: .95rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
section { border-top: 1px solid var(--line); padding: 1rem 0; }
pre { margin: .5rem 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .9rem/1.65 ui-monospace, monospace; }
.prompt { color: var(--faint); border-left: 3px solid var(--line); padding-left: .75rem; }
.note { color: var(--faint); font-size: .85rem; }
i { font-style: normal; border-radius: 2px; }
b { font: 600 .72rem system-ui, sans-serif; border: 1px solid currentColor; border-radius: 4px;
  padding: 0 .3rem; margin: 0 .2rem; white-space: nowrap; }
.observation { color: var(--faint); outline: 1px dotted var(--faint); font-style: italic; }
.cut, .age { color: var(--faint); text-decoration: line-through; }
.age { text-decoration-style: double; }
"""


def sheet_as_page(sheet: Sheet) -> str:
    """Return the whole file."""
    title = escape(f"run {sheet.run}, {sheet.title}")
    body = [f"<h1>{title}: {len(sheet.entries)} of {sheet.num_answers} answers</h1>", _legend()]
    body += [_section(entry) for entry in sheet.entries]
    if sheet.gone:
        rows = "".join(f"<li>{escape(fate_line_of(fate))}</li>" for fate in sheet.gone)
        body.append(f'<section class="note"><ul>{rows}</ul></section>')
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{title}</title><style>{STYLE}{_shade_styles()}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _shade_styles() -> str:
    """Return a colour per shade that is laid over light and dark paper alike."""
    return "".join(f".s{shade} {{ background: hsl({hue} 90% 45% / .38); }}\n" for shade, hue in HUES.items())


def _legend() -> str:
    bounds = " ".join(
        f'<i class="s{shade}">from {bound:g}</i>' for shade, bound in enumerate(SHADE_BOUNDS, start=1)
    )
    masks = " ".join(f'<i class="{name}">{escape(why)}</i>' for why, name in CLASSES.items())
    return f'<p class="note">minus log-prob: under {SHADE_BOUNDS[0]:g} {bounds}<br>not trained: {masks}</p>'


def _section(entry: Entry) -> str:
    fate = entry.rollout.fate
    why = f'<p class="note">{escape(fate_line_of(fate))}</p>' if fate.reason else ""
    masks = f'<p class="note">{escape(masks_line_of(entry))}</p>' if masks_line_of(entry) else ""
    answer = "".join(map(_token, entry.pieces))
    return (
        f"<section><h2>{escape(headline_of(entry))}</h2>{why}"
        f'<pre class="prompt">{escape(entry.prompt)}</pre><pre>{answer}</pre>{masks}</section>'
    )


def _token(piece: Piece) -> str:
    badge = "" if piece.begins is None else f"<b>{escape(badge_of(piece.begins))}</b>"
    name = CLASSES[piece.mask] if piece.mask else f"s{piece.shade}"
    why = f", {piece.mask}" if piece.mask else ""
    text = escape(printable(piece.text))
    return f'{badge}<i class="{name}" title="{piece.logprob:.3f}{escape(why)}">{text}</i>'

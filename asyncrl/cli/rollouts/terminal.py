"""A sheet on a terminal: colours by log-prob, and signs that also stand where there is no colour (pure).

A token's text never reaches the terminal as it is: what would steer it is written out.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from asyncrl.cli.rollouts.fates import CUT, OBSERVED, OVER_AGE
from asyncrl.cli.rollouts.pieces import SHADE_BOUNDS, Piece, badge_of
from asyncrl.cli.rollouts.sheet import Entry, Sheet, fate_line_of, headline_of, masks_line_of
from asyncrl.core.files.printable import printable

SHADES = ("", "green", "green_yellow", "yellow", "dark_orange", "red", "bold red")
SIGNS = {OBSERVED: ("⟦", "⟧"), CUT: ("⟦", "⟧"), OVER_AGE: ("⟪", "⟫"), "": ("", "")}
MASKED = {OBSERVED: "dim italic", CUT: "dim strike", OVER_AGE: "dim strike"}
BADGE, RULE = "reverse", "bold"
MAX_GONE = 20
UNLIKELY = 3
"""The shade from which on a token's log-prob is written where there is no colour."""
PLAIN_LEGEND = (
    f"[vN lag L]: version that sampled what follows, and its lag   {{x}}: minus log-prob of the "
    f"token before it, from {SHADE_BOUNDS[UNLIKELY - 1]:g} on   not trained: ⟦observation, cut⟧ ⟪over age⟫"
)


def sheet_on_terminal(sheet: Sheet, *, has_colors: bool) -> RenderableType:
    """Return what a rich console prints, with `soft_wrap`; without colours, numbers say what they would."""
    head = Text(f"run {sheet.run}, {sheet.title}: {len(sheet.entries)} of {sheet.num_answers} answers", RULE)
    parts: list[RenderableType] = [head, legend() if has_colors else Text(PLAIN_LEGEND)]
    for entry in sheet.entries:
        parts += [Text(), *_lines_of(entry, has_colors)]
    if sheet.gone:
        parts.append(Text())
    parts += [Text(fate_line_of(fate)) for fate in sheet.gone[:MAX_GONE]]
    if len(sheet.gone) > MAX_GONE:
        parts.append(Text(f"and {len(sheet.gone) - MAX_GONE} more; --json has them all"))
    return Group(*parts)


def legend() -> Text:
    """Return what the colours and signs say."""
    text = Text().append("minus log-prob: ", "dim")
    text.append(f"under {SHADE_BOUNDS[0]:g}")
    for bound, style in zip(SHADE_BOUNDS, SHADES[1:], strict=True):
        text.append(" ").append(f"from {bound:g}", style)
    return text.append("   not trained: ⟦observation, cut⟧ ⟪over age⟫", "dim")


def _lines_of(entry: Entry, has_colors: bool) -> list[Text]:
    fate = entry.rollout.fate
    lines = [Text(headline_of(entry), RULE)]
    if fate.reason:
        lines.append(Text(fate_line_of(fate)))
    label = "" if has_colors else "prompt: "
    answer = answer_of(entry) if has_colors else Text(plain_answer_of(entry))
    lines += [Text(label + entry.prompt, "dim"), answer]
    if masks := masks_line_of(entry):
        lines.append(Text(masks, "dim"))
    return lines


def answer_of(entry: Entry) -> Text:
    """Return the answer's tokens, a badge where a version begins, signs around what is not trained."""
    text, mask = Text(), ""
    for piece in entry.pieces:
        if piece.mask != mask or piece.begins is not None:
            text.append(SIGNS[mask][1])
            if piece.begins is not None:
                text.append(badge_of(piece.begins), BADGE).append(" ")
            text.append(SIGNS[piece.mask][0])
            mask = piece.mask
        text.append(printable(piece.text), _style_of(piece))
    return text.append(SIGNS[mask][1])


def plain_answer_of(entry: Entry) -> str:
    """Return the answer for where there is no colour: each span on a line of its own behind its version.

    A token that the policy thought unlikely is followed by its minus log-prob.
    """
    lines, mask = ["answer:"], ""
    for piece in entry.pieces:
        if piece.begins is not None:
            lines[-1] += SIGNS[mask][1]
            lines.append(f"  [{badge_of(piece.begins)}] ")
            mask = ""
        if piece.mask != mask:
            lines[-1] += SIGNS[mask][1] + SIGNS[piece.mask][0]
            mask = piece.mask
        lines[-1] += printable(piece.text)
        if piece.shade >= UNLIKELY:
            lines[-1] += f"{{{-piece.logprob:.1f}}}"
    return "\n".join(lines) + SIGNS[mask][1]


def _style_of(piece: Piece) -> str:
    return MASKED[piece.mask] if piece.mask else SHADES[piece.shade]

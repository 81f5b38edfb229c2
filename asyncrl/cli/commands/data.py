"""`asyncrl data`: makes prompt files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli import exits
from asyncrl.cli.options import GROUP, show_help
from asyncrl.core.variants import function

PLACE = 6
app = typer.Typer(name="data", help="Make prompt files.", callback=show_help, **GROUP)


@app.command()
def gsm8k(
    source: Annotated[Path, typer.Argument(metavar="SRC", exists=True, help="GSM8K's jsonl file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The Parquet file to write.")],
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N rows.")] = None,
) -> None:
    """Convert GSM8K to prompts that a run can read."""
    num_prompts = function("rollout_service.data.gsm8k:convert_gsm8k")(source, target, limit)
    exits.say(f"wrote {num_prompts} prompts to {target}")

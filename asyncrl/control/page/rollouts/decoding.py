"""Token ids as text, for the page and `asyncrl inspect rollouts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Decode = Callable[[Sequence[int]], str]


def decoder_of(model: Path, warn: Callable[[str], None]) -> Decode:
    """Return what turns token ids into text; ids in angle brackets where no tokenizer can be read.

    It reads `tokenizer.json` itself: transformers takes seconds to import and half a gigabyte of memory.
    """
    from tokenizers import Tokenizer

    path = model / "tokenizer.json"
    if not path.exists():
        warn(f"token ids are shown: {path} is not there")
        return _show_ids
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no class of its own; the file may be newer than it
        warn(f"token ids are shown: {path} cannot be read: {error}")
        return _show_ids
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _show_ids(ids: Sequence[int]) -> str:
    return "".join(f"<{number}>" for number in ids)

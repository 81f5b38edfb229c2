"""Stand-in for torchvision on a CPU: SGLang imports its names with every model, and text needs none of them.

The package's plain builds are for CUDA, and do not load beside a CPU build of torch.
"""

from __future__ import annotations

import enum
import sys
from types import ModuleType

__version__ = "0.0.0"


class InterpolationMode(enum.Enum):
    """The names that configurations of image models take their defaults from."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Part(ModuleType):
    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: object, **_options: object) -> None:
            raise RuntimeError(f"torchvision is not installed: no {name}")

        return missing


def _part(name: str) -> _Part:
    part = sys.modules[f"torchvision.{name}"] = _Part(f"torchvision.{name}")
    part.__path__ = []
    return part


io, transforms = _part("io"), _part("transforms")
transforms.functional, transforms.v2 = _part("transforms.functional"), _part("transforms.v2")  # type: ignore[attr-defined]
transforms.v2.functional = _part("transforms.v2.functional")

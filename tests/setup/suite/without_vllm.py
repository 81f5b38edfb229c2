"""Process: imports asyncrl's modules in a Python where vLLM cannot be imported; prints those that fail."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType


class NoVllm:
    """A finder that hides vLLM."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, NoVllm())
    for package in ("asyncrl", "configs", "learner", "rollout_service", "weight_sync"):
        for module in pkgutil.walk_packages([package], f"{package}.", onerror=lambda name: None):
            if module.name.endswith("__main__") or ".sglang." in module.name:
                continue
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "vllm":
                    raise
                print(module.name)

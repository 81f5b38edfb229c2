"""Entry point that prints the page of metrics: `python -m asyncrl.core.metrics > docs/metrics.md`."""

from __future__ import annotations

import sys

from asyncrl.core.metrics.page import render

sys.stdout.write(render())

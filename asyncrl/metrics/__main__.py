"""Prints the page of metrics: `python -m asyncrl.metrics > docs/metrics.md`."""

from __future__ import annotations

import sys

from asyncrl.metrics.page import render

sys.stdout.write(render())

"""Answers of the run over HTTP: its page, its metrics for Prometheus, its health."""

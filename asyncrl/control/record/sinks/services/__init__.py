"""Services that get metrics: one module for each name of `metrics.sinks`, found by it."""

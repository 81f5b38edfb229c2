"""A task that needs its tool: products of two-digit numbers, with a tiny model that cannot multiply."""

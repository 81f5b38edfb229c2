"""Core: what every package of asyncrl may import, and what imports none of them."""

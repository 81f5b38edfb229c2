"""The gateway beside vLLM's own server, on one engine."""

"""vLLM's engine core: how it is started on a CPU, and what it died of."""

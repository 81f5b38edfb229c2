"""Inference engines: the protocol, vLLM's adapter with its weight-transfer plugin, a scripted one."""

"""Copies between a GPU and the host's memory."""

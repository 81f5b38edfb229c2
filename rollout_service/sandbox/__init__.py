"""Sandboxes: code of a model runs in namespaces of its own, without network, within limits."""

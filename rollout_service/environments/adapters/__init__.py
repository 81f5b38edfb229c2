"""Environments of other libraries, imported only when they are asked for."""

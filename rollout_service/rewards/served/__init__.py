"""Rewards that are not computed in the replica's event loop: in processes beside it, or on a server."""

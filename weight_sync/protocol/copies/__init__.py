"""Copies of versions at peers: which are kept, and which are shared by the processes of a node."""

"""Sampling: episodes, the groups that they make, and partial groups that another replica goes on with."""

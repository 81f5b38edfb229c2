"""Rollouts on the page: the newest groups, decoded."""

"""Planner benchmark: live runs, watched in windows of constant settings, that feed and judge the planner."""

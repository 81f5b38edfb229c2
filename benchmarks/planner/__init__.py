"""What the planner is fed with and judged by: live runs, watched in windows in which nothing changes."""

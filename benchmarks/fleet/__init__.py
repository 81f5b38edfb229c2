"""Fleet: many replicas, and the planner's predictions beside live runs."""

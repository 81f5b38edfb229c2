"""Rules that callers of the buffer follow, in services and planner: a replica's leases, a learner's steps."""

"""A rollout replica: leases groups, generates them, pushes them, and swaps weights under way."""

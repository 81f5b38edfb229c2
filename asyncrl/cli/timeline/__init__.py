"""Timeline of every service, from a run's record, for a viewer of traces."""

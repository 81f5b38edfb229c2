"""What every service did when, from a run's record: for a viewer of traces."""

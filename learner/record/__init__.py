"""Record of a run's training (`run.record`), and its replay (`asyncrl replay`)."""

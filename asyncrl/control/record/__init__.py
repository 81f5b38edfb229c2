"""Files of a run on disk: its folder, metric rows, rates and summary."""

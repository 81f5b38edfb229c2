"""What a run leaves on disk: its folder, metric rows, rates and summary."""

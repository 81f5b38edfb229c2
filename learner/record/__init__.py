"""What a run trained on, kept (`run.record`), and trained again (`asyncrl replay`)."""

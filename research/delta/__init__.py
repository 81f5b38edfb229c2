"""Parts of the study of differences between versions: its tables, and the same from real runs."""

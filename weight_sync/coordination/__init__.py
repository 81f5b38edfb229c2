"""What surrounds the coordinator's decisions: its mail, its journal, its picture for others."""

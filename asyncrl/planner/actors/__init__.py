"""The processes of a run, each around the real state machine that it drives in production."""

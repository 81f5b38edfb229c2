"""The live page of a run: what it shows, from where, and the static files that show it."""

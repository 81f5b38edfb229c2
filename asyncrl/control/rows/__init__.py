"""Rows of metrics: fetched from the learner, completed, written, thinned and exported."""

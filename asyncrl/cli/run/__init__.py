"""A run as a terminal has it: start, find, ask, resume and end it."""

"""The commands, by group: each reads its arguments, calls one function and sets the exit code."""

"""The account of every ticket: pure, no clock, no I/O."""

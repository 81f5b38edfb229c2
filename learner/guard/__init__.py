"""The stability guard: what went wrong in a step, why, and what is done about it."""

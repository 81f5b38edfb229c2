"""Which services a run should have, which it has, and what to do about the difference."""

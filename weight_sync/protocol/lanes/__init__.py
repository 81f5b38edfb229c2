"""Begin of rounds: which lane a member is in, and the orders by which its transfer starts."""

"""Studies of vLLM on a CPU: whose log-probs are equal to the bit, and what number formats and adapters cost."""

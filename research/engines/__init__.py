"""Studies of vLLM on a CPU: whose log-probs are equal to the bit, and the cost of formats and adapters."""

"""A Hugging Face causal language model, and how packed rows go through it."""

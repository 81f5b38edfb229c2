"""Built-in tasks: a model, its tokenizer and its prompts, made on the spot."""

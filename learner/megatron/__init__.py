"""Adapters to Megatron-core: the model, its conversion, its optimizer and the learner backend."""

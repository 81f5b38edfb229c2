"""asyncrl: asynchronous reinforcement learning for language models.

The kernel. Every service imports it; it imports no torch, vLLM, Ray or Megatron.
"""

__version__ = "0.1.0"

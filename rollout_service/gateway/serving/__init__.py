"""vLLM's own serving of chats, completions, responses and messages, over the gateway's sessions."""

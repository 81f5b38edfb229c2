"""An OpenAI-compatible endpoint in a replica's process, for agents that only know a `base_url`."""

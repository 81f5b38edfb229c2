"""Output of commands: text for people, JSON for programs."""

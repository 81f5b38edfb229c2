"""SGLang as an engine: the adapter, the messages to the child process that runs it, and that process."""

"""vLLM: the adapter of its asynchronous engine, and the plugin that loads weights in its workers."""

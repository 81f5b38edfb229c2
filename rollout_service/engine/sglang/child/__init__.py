"""The child process, in SGLang's environment: imports neither vLLM nor Ray."""

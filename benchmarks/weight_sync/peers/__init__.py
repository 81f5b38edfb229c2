"""Parts of the weight-sync benchmark: our services, bare gloo groups, a real engine, vLLM's own client."""

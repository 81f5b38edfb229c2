"""What the weight-sync benchmark runs: our services, bare gloo groups, a real engine, vLLM's own client."""

"""This machine: processes, ports, CPUs and GPUs, what its kernel kills and refuses."""

"""Ray: its start and end, the cluster and its nodes, the head, the launcher, the host of a service."""

"""Buffer: its full path beside bare pipes, its ledger, its restart, its attackers."""

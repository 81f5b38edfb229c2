"""Services that a run's metrics also go to, each behind a bounded queue and a thread of its own."""

"""The checks and counters of every request: tenants, limits, sessions, metrics."""

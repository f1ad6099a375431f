"""Paged attention: one interface, a backend for each kind of device."""

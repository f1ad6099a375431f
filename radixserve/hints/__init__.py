"""Hints: a caller's advice to retain, pin, demote, prefetch or share a prefix.

They plug into the scheduler as a `SchedulerExtension`.
"""

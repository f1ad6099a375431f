"""Decides what runs in each step. Plain Python and numpy; knows no model."""

from radixserve.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]

"""Tenants share the machine by computed tokens. They plug into the scheduler as its `Shares`."""

from radixserve.tenants.shares import TenantShares

__all__ = ["TenantShares"]

"""Policies that decide which waiting requests start. They plug into the scheduler as an
`AdmissionPolicy`."""

from __future__ import annotations

from radixserve.scheduler.policy import AdmissionPolicy


def make_admission(name: str) -> AdmissionPolicy:
    """Returns the policy of that name, one of `EngineConfig.admission`."""
    if name == "greedy":
        return AdmissionPolicy()
    from radixserve.admission_policies.priced import PricedAdmission

    return PricedAdmission()

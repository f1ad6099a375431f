"""`kind`: a test runs with every implementation of a prefix cache."""

from __future__ import annotations

import pytest

from tests.cache.kinds import KINDS, Kind


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind

"""docs/models.md against the walk that writes it."""

from __future__ import annotations

import pytest

from tests.models.causal_models import (
    NATIVE,
    REFUSED,
    RIGHT,
    WRONG,
    model_types,
    read_page,
    try_model,
)

SAMPLE = ["gemma2", "gemma4", "deepseek_v3", "opt", "bamba", "bloom"]


@pytest.mark.parametrize("model_type", SAMPLE)
def test_the_page_is_true(model_type: str) -> None:
    found = try_model(model_type)
    assert (found.status, found.detail) == read_page()[model_type]


def test_the_page_names_nothing_wrong() -> None:
    page = read_page()
    assert not [name for name, (status, _) in page.items() if status == WRONG]
    assert sum(status in (NATIVE, RIGHT, REFUSED) for status, _ in page.values()) >= 70


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("model_type", model_types())
def test_every_model(model_type: str) -> None:
    found, page = try_model(model_type), read_page()
    assert found.status != WRONG, found.detail
    if model_type in page:  # else of another transformers than the page's
        assert found.status == page[model_type][0], found.detail

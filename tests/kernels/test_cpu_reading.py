"""How packed weights are read: measured once, kept, chosen by a setting, the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from radixserve_kernels.cpu_library import CpuLibraryError, forget, forms_library
from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.cpu_reading import WAYS, Reading, measure, use_reading
from radixserve_kernels.cpu_weights import PackedWeight
from tests.kernels.test_quantized import FORMS, random_weight

pytestmark = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)), reason="no CPU kernels on this machine"
)
VARIABLE = "RADIXSERVE_CPU_READING"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    forget()


@pytest.mark.parametrize("form", FORMS)
def test_every_reading_gives_the_same_bits(form: str) -> None:
    library = forms_library()
    weight = PackedWeight(random_weight(form, 330, 512))
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(2))
    library.radixserve_use_reading(0, 0)
    expected = [weight(x[:count]) for count in (1, 9)]
    for one_row, rows in product(range(len(WAYS)), repeat=2):
        library.radixserve_use_reading(one_row, rows)
        for wanted, count in zip(expected, (1, 9), strict=True):
            assert torch.equal(weight(x[:count]), wanted)


def test_the_measured_reading_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    library, file = forms_library(), tmp_path / "cpu.reading"
    measured = use_reading(library, file)
    assert set(measured) <= set(WAYS)
    assert Reading.parse(file.read_text()) == measured
    for other in (Reading("plain", "far"), Reading("near", "plain")):
        file.write_text(str(other))
        assert use_reading(library, file) == other
    for junk in ("", "near", "near,near,near", "\x00", "fast,near"):
        file.write_text(junk)
        assert Reading.parse(file.read_text()) is None
    assert set(use_reading(library, file)) <= set(WAYS)  # junk is measured again
    assert Reading.parse(file.read_text()) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.reading"]
    assert set(use_reading(library, tmp_path / "missing" / "cpu.reading")) <= set(WAYS)


def test_a_reading_that_cannot_be_kept_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "cpu.reading").mkdir()  # cannot be replaced by a file
    assert set(use_reading(forms_library(), tmp_path / "cpu.reading")) <= set(WAYS)
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.reading"]


def test_a_setting_goes_before_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, file = forms_library(), tmp_path / "cpu.reading"
    monkeypatch.setenv(VARIABLE, "far,plain")
    assert use_reading(library, file) == ("far", "plain")
    assert not file.exists()
    monkeypatch.setenv(VARIABLE, "fast")
    forget()
    with pytest.raises(CpuLibraryError, match="RADIXSERVE_CPU_READING=fast: two of near, far"):
        forms_library()


def test_a_measurement_names_ways() -> None:
    assert set(measure(forms_library())) <= set(WAYS)

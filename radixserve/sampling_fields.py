"""The sampling fields of a request: their neutral values and what they allow."""

from __future__ import annotations

from collections.abc import Mapping

from radixserve.checks import check_float, check_int
from radixserve.errors import InvalidRequest

LEAST_TEMPERATURE = 1e-5  # below it float32 cannot hold the scaled logits
NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


class NotGivenFloat(float):
    """A neutral value in a field that the caller left out: a default may take its place."""

    __slots__ = ()


class NotGivenInt(int):
    """`NotGivenFloat` of an integer field."""

    __slots__ = ()


def check_field(name: str, value: object) -> float:
    """Returns the value of a sampling field in `NEUTRAL`. Raises InvalidRequest."""
    if name == "top_k":
        return check_int(name, value, -1)
    if name == "top_p":
        return check_float(name, value, 0.0, 1.0, open_low=True)
    if name == "min_p":
        return check_float(name, value, 0.0, 1.0)
    if name == "repetition_penalty":
        return check_float(name, value, 0.01, 100.0)
    number = check_float(name, value, 0.0, 100.0)
    if 0.0 < number < LEAST_TEMPERATURE:
        raise InvalidRequest(
            f"temperature must be 0 (greedy) or >= {LEAST_TEMPERATURE:g}, got {number}"
        )
    return number

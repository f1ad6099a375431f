"""Patterns of string formats, for what llguidance does not check or bound itself.

Every text that a pattern matches is valid; some valid texts are left out, so that answers end and
that Python, JavaScript and pydantic read them:

- dates are of the years 1 to 9999, with 29 February in leap years only; times have a zone, capital
  letters, no leap second and at most nine digits of a second;
- the numbers of durations are bounded, so that their sum is at most 10^9 days;
- a label of a hostname has no two hyphens at its third place, as encoded (xn--) labels have;
- the local part of an email address has no quotes and at most 32 characters besides dots, its
  domain two labels or more and no address literal.
"""

from __future__ import annotations

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_OF_FOUR = "(?:0[48]|[2468][048]|[13579][26])"  # two digits that are a multiple of 4, but not 00
_LEAP_YEAR = f"(?:[0-9]{{2}}{_OF_FOUR}|{_OF_FOUR}00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:[.][0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"

_CLOCK = "(?:H(?:{n}M(?:{n}S)?)?|M(?:{n}S)?|S)".format(n="[0-9]{1,9}")
_CLOCK = f"T[0-9]{{1,9}}{_CLOCK}"
_DAYS = "[0-9]{1,8}"
_MONTHS = "[0-9]{1,6}"
_DURATION = (
    f"P(?:{_DAYS}W|{_CLOCK}|(?:{_MONTHS}Y(?:{_MONTHS}M(?:{_DAYS}D)?)?|{_MONTHS}M(?:{_DAYS}D)?"
    f"|{_DAYS}D)(?:{_CLOCK})?)"
)

_ALNUM, _HYPHENATED = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LABEL = (
    f"(?:{_ALNUM}{{1,2}}|{_ALNUM}{_HYPHENATED}{_ALNUM}"
    f"|{_ALNUM}{_HYPHENATED}(?:-{_ALNUM}|{_ALNUM}{{2}})"
    f"|{_ALNUM}{_HYPHENATED}(?:-{_ALNUM}|{_ALNUM}{_HYPHENATED}){_HYPHENATED}{{0,58}}{_ALNUM})"
)
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_EMAIL = f"{_ATOM}(?:[.]?{_ATOM}){{0,31}}@(?:{_LABEL}[.])+[A-Za-z]{{2,63}}"

_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"


def _uuid(version: int) -> str:
    """RFC 9562's form of one version, as pydantic names it."""
    digit = "[0-9a-f]"
    return f"{digit}{{8}}-{digit}{{4}}-{version}{digit}{{3}}-[89ab]{digit}{{3}}-{digit}{{12}}"


PATTERNS = {
    name: f"^{pattern}$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": _DURATION,
        "hostname": f"{_LABEL}(?:[.]{_LABEL})*",
        "email": _EMAIL,
        **{f"uuid{version}": _uuid(version) for version in range(1, 9)},
        "json-pointer": _POINTER,
        "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
        "byte": _BASE64,
        "base64": _BASE64,
    }.items()
}
# The most characters of a text that its pattern does not bound.
MAX_LENGTHS = {"hostname": 253, "email": 254}
# Formats that llguidance checks itself.
CHECKED = frozenset({"ipv4", "ipv6", "uri", "uuid", "unknown"})

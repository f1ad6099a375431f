"""Conversations keep the date that they began with."""

from __future__ import annotations

from datetime import datetime, timedelta

from radixserve.text.chat_clocks import ChatClocks

MONDAY = datetime(2026, 3, 2, 23, 59)
TUESDAY = MONDAY + timedelta(minutes=2)
ASK, ANSWER, MORE = ("user", "Hi."), ("assistant", "Hello."), ("user", "And?")


def test_a_conversation_keeps_its_date() -> None:
    clocks = ChatClocks(10)
    start = clocks.start_of("a", [ASK], MONDAY)
    assert start.began == MONDAY
    clocks.note_answer(start, "Hello.")
    assert clocks.start_of("a", [ASK, ANSWER, MORE], TUESDAY).began == MONDAY
    later = [ASK, ANSWER, MORE, ("assistant", "?"), ("user", "So?")]
    assert clocks.start_of("a", later, TUESDAY).began == MONDAY
    assert clocks.start_of("a", [ASK], TUESDAY).began == TUESDAY  # a new one
    # The old one is still known by its answer; one whose answer was edited, by its question.
    assert clocks.start_of("a", [ASK, ANSWER, ("user", "Else?")], TUESDAY).began == MONDAY
    edited = [ASK, ("assistant", "Hello"), MORE]
    assert clocks.start_of("a", edited, TUESDAY).began == TUESDAY
    assert clocks.start_of("b", [ASK, ANSWER, MORE], TUESDAY).began == TUESDAY


def test_texts_are_not_joined() -> None:
    clocks = ChatClocks(10)
    clocks.start_of("a", [("user", "x", "y")], MONDAY)
    for other in (("user", "xy", ""), ("user", "x", "y", ""), ("userx", "y")):
        assert clocks.start_of("a", [other, ANSWER], TUESDAY).began == TUESDAY
    assert clocks.start_of("a", [("user", "x", "y"), ANSWER], TUESDAY).began == MONDAY
    assert clocks.start_of("a", [("user", "\ud800")], MONDAY).began == MONDAY


def test_it_is_bounded() -> None:
    clocks = ChatClocks(2)
    for number in range(100):
        start = clocks.start_of("a", [("user", str(number))], MONDAY)
        clocks.note_answer(start, "Hello.")
    assert len(clocks) == 16
    assert clocks.start_of("a", [("user", "99"), ANSWER, MORE], TUESDAY).began == MONDAY
    assert clocks.start_of("a", [("user", "0"), ANSWER, MORE], TUESDAY).began == TUESDAY
    none = ChatClocks(0)
    none.start_of("a", [ASK], MONDAY)
    assert none.start_of("a", [ASK, ANSWER], TUESDAY).began == TUESDAY

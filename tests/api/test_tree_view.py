"""The picture of the tree and its plain data, from hand-made dumps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from radixserve.api.tree_view import describe_tree, draw_tree, edge_text, shorten
from radixserve.cache import RadixCache


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def node(start: int, text: str, *children: dict[str, Any], held: int = 0) -> dict[str, Any]:
    return {
        "start": start,
        "num_tokens": len(text),
        "tokens": [ord(c) for c in text],
        "pages": [],
        "lock_ref": held,
        "sequences": held,
        "state": "referenced" if held else "cached",
        "last_use": None if held else 5.0,
        "children": list(children),
    }


def dump_of(**namespaces: dict[str, Any]) -> dict[str, Any]:
    spaces = {"" if name == "main" else name: root for name, root in namespaces.items()}
    return {"page_size": 1, "truncated": False, "namespaces": spaces}


SMALL = dump_of(
    main=node(0, "", node(0, "Hello ", node(6, "you\n"), node(6, "x" * 300), held=3)),
)


def drawn(dump: dict[str, Any], width: int = 100, **options: Any) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(draw_tree(dump, decode, width=width, **options))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_small_tree_is_drawn() -> None:
    lines = drawn(SMALL)
    assert lines[0] == "3 nodes, 310 tokens, page size 1"
    assert lines[1] == "└── 6 tokens [0, 6) locks 3 sequences 3 'Hello '"
    assert lines[2] == r"    ├── 4 tokens [6, 10) locks 0 sequences 0 'you\n'"
    assert lines[3].startswith("    └── 300 tokens [6, 306) locks 0 sequences 0 'xxx")
    assert " … " in lines[3]
    assert lines[3].endswith("x'")
    assert len(lines) == 4


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(SMALL, width)
    assert len(lines) == 4
    assert max(map(len, lines)) <= width


def test_namespaces_and_a_cut_are_named() -> None:
    dump = dump_of(main=node(0, "", node(0, "a")), tenant=node(0, "", node(0, "b")))
    dump["truncated"] = True
    text = "\n".join(drawn(dump))
    assert "namespace ''" in text
    assert "namespace 'tenant'" in text
    assert "more nodes" in text


def test_a_deep_tree_is_drawn() -> None:
    deep = node(299, "z")
    for start in range(298, -1, -1):
        deep = node(start, "z", deep)
    lines = drawn(dump_of(main=node(0, "", deep)))
    assert len(lines) == 301
    assert all(f" [{at}, {at + 1}) " in line for at, line in enumerate(lines[1:]))
    assert max(map(len, lines)) <= 100
    assert describe_tree(dump_of(main=node(0, "", deep)), decode)["namespaces"][""]


def test_text_in_brackets_is_no_markup() -> None:
    assert "'[bold]a[/x]'" in drawn(dump_of(main=node(0, "", node(0, "[bold]a[/x]"))))[1]


def test_edges_without_text_show_ids() -> None:
    assert edge_text([5, 6], None, 20) == "ids 5 6"
    assert edge_text([5, 6], lambda _: "", 20) == "ids 5 6"
    assert len(edge_text(list(range(1000)), None, 20)) == 20


def test_shorten_keeps_both_ends() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("a" * 50 + "z" * 50, 13) == "aaaaaaa … zzz"
    assert [len(shorten("a" * 50, width)) for width in range(1, 9)] == list(range(1, 9))


def test_plain_data_of_a_real_cache() -> None:
    cache = RadixCache(num_pages=64)
    for text in ("abcd", "abxy"):
        seq = cache.acquire([ord(c) for c in text])
        seq.extend([ord(c) for c in text][seq.cached_len :])
        seq.commit(seq.length)
        seq.release()
    held = cache.acquire([ord(c) for c in "abcd"], allow_full=True)
    data = describe_tree(cache.dump(), decode)
    (top,) = data["namespaces"][""]
    assert (top["text"], top["sequences"], top["num_tokens"]) == ("ab", 1, 2)
    below = {child["text"]: child["sequences"] for child in top["children"]}
    assert below == {"cd": 1, "xy": 0}
    held.release()

"""Shows the prefix tree as a drawing for the terminal, and as plain data.

Input are the nested dicts of `RadixCache.dump`; `decode` turns token ids into text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from radixserve.reports import FlatNode, FlatTreeDump, TreeDump, TreeNode

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

T = TypeVar("T")
Decode = Callable[[Sequence[int]], str]

INDENT = 4  # columns that a level of the drawing takes
_LEAST_TEXT = 12  # columns left for the text of an edge
_LEAST_LABEL = 48  # columns left for a node, as far as the width allows
_GAP = " … "
_FACTS = ("start", "num_tokens", "lock_ref", "sequences", "state", "last_use")


def draw_tree(dump: Mapping[str, Any], decode: Decode | None, *, width: int) -> Tree:
    """Returns a drawing with one node per line: its tokens, positions, locks and sequences, and the
    edge's text, shortened to fit into `width` columns. Without `decode` edges are token ids.
    """
    from rich.text import Text
    from rich.tree import Tree

    drawing = Tree(_summary(dump), highlight=False)
    spaces: Mapping[str, Mapping[str, Any]] = dump["namespaces"]

    def label(node: Mapping[str, Any], mark: str, width: int) -> Text:
        return _label(mark, node, decode, width)

    for name, root in spaces.items():
        is_only = not name and len(spaces) == 1
        top = drawing if is_only else drawing.add(Text(f"namespace {name!r}"))
        room = width if is_only else width - INDENT
        draw_below(
            top,
            root["children"],
            label,
            lambda node: node["children"],
            width=room,
            least=_LEAST_LABEL,
        )
    if dump["truncated"]:
        drawing.add("… and more nodes, which are not drawn")
    return drawing


def draw_below(
    top: Tree,
    items: Sequence[T],
    label: Callable[[T, str, int], Text],
    children: Callable[[T], Sequence[T]],
    *,
    width: int,
    least: int,
) -> None:
    """Add items and their descendants, depth first, to `top`.

    Levels that would leave less than `least` of `width` columns share one column; their items get
    a mark. `label(item, mark, columns)` returns an item's line.
    """
    deepest = max(1, (width - least) // INDENT)
    stack = [(item, top, 1) for item in reversed(items)]
    while stack:
        item, place, level = stack.pop()
        mark = "↳ " if level > deepest else ""
        branch = place.add(label(item, mark, width - INDENT * min(level, deepest)))
        below = branch if level < deepest else place
        stack += [(child, below, level + 1) for child in reversed(children(item))]


def describe_tree(dump: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    """Returns the tree as plain data: `_FACTS`, text and children of each node."""
    namespaces: dict[str, list[dict[str, Any]]] = {}
    stack: list[tuple[Mapping[str, Any], list[dict[str, Any]]]] = []
    for name, root in dump["namespaces"].items():
        namespaces[name] = []
        stack.append((root, namespaces[name]))
    while stack:
        node, place = stack.pop()
        for child in node["children"]:
            facts = {key: child[key] for key in _FACTS}
            below: list[dict[str, Any]] = []
            text = None if decode is None else decode(child["tokens"])
            place.append({**facts, "text": text, "children": below})
            stack.append((child, below))
    return {
        "page_size": dump["page_size"],
        "truncated": dump["truncated"],
        "namespaces": namespaces,
    }


def escape(text: str) -> str:
    """Returns a text on one line: control characters, and white space except blanks, are
    escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, width: int) -> str:
    """Returns at most `width` characters of a text: its head and tail, without the middle."""
    if len(text) <= width:
        return text
    kept = width - len(_GAP)
    if kept < 2:
        return text[:width]
    tail = kept // 3
    return text[: kept - tail] + _GAP + text[len(text) - tail :]


def edge_text(tokens: Sequence[int], decode: Decode | None, width: int) -> str:
    """Returns the text of an edge in quotes, escaped and shortened; its token ids without a
    text."""
    tokens = list(tokens)
    room = max(1, width - 2)
    if decode is not None:
        text = escape(_decode_ends(tokens, decode, room))
        if text:
            return f"'{shorten(text, room)}'"
    ids = " ".join(map(str, tokens[: room + 1]))
    return shorten(f"ids {ids}", width)


def _decode_ends(tokens: list[int], decode: Decode, room: int) -> str:
    """Returns the text of an edge; for a very long edge the text of both ends."""
    if len(tokens) <= 4 * room:
        return decode(tokens)
    return decode(tokens[: 2 * room]) + decode(tokens[-2 * room :])


def _summary(dump: Mapping[str, Any]) -> str:
    nodes = tokens = 0
    stack = list(dump["namespaces"].values())
    while stack:
        node = stack.pop()
        stack.extend(node["children"])
        nodes += len(node["children"])
        tokens += sum(child["num_tokens"] for child in node["children"])
    many = "" if nodes == 1 else "s"
    return f"{nodes} node{many}, {tokens:,} tokens, page size {dump['page_size']}"


def _label(mark: str, node: Mapping[str, Any], decode: Decode | None, width: int) -> Text:
    from rich.text import Text

    start, count = node["start"], node["num_tokens"]
    facts = (
        f"{mark}{count:,} token{'' if count == 1 else 's'} [{start:,}, {start + count:,})"
        f" locks {node['lock_ref']} sequences {node['sequences']} "
    )
    text = edge_text(node["tokens"], decode, max(_LEAST_TEXT, width - len(facts)))
    return Text.assemble(
        (facts, "bold green" if node["sequences"] else "cyan"),
        text,
        no_wrap=True,
        overflow="ellipsis",
    )


def flat_tree(dump: TreeDump) -> FlatTreeDump:
    """Returns a dump with its nodes as one list. It can be printed and written at any depth.

    "nodes" replaces "namespaces": each node has its "id", that of its "parent" (None: a root) and
    its "namespace"; parents come before children. O(nodes), without recursion.
    """
    nodes: list[FlatNode] = []
    queue: deque[tuple[TreeNode, int | None, str]] = deque(
        (root, None, name) for name, root in dump["namespaces"].items()
    )
    while queue:
        node, parent, namespace = queue.popleft()
        node_id = len(nodes)
        facts = {name: value for name, value in node.items() if name != "children"}
        entry = {"id": node_id, "parent": parent, "namespace": namespace, **facts}
        nodes.append(cast(FlatNode, entry))
        queue.extend((child, node_id, namespace) for child in node["children"])
    rest = {name: value for name, value in dump.items() if name != "namespaces"}
    return cast(FlatTreeDump, {**rest, "nodes": nodes})

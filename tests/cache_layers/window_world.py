"""The worlds of `world` with layers that see a window of positions only.

Every slot of a window page holds the token prefix that it stands for, as slots of pages do. The
table of window pages is kept as a runner keeps it: from updates alone.
"""

from __future__ import annotations

from typing import Any

from radixserve.cache import Lookup, OutOfPages, RadixCache
from radixserve.cache_layers import WindowedLayers
from radixserve.schedule import WindowLayers
from tests.cache.hash_world import LateWorld
from tests.cache.world import Prefix, World


class WindowWorld(World):
    window_size = 6
    num_window_pages = 24

    def make_cache(self, num_pages: int, page_size: int, **options: Any) -> RadixCache:
        self.table: dict[int, int] = {}  # page -> window page
        self.window_cells: dict[tuple[int, int], Prefix] = {}
        self.copies: list[tuple[int, int, int]] = []
        layers = WindowLayers(self.num_window_pages, self.window_size)
        return RadixCache(
            num_pages,
            page_size,
            options["eviction"],
            reuse=options["reuse"],
            layers=WindowedLayers(num_pages, page_size, layers),
            max_lease_share=0.4,
            clock=lambda: self.now,
        )

    def update(self) -> None:
        """Note what a runner does before a step."""
        layers = self.cache.layers
        assert isinstance(layers, WindowedLayers)
        updates = layers.windows.take_updates()
        for page, window in updates.pages.tolist():
            self.table[page] = window
        self.copies += updates.copies

    def copied(self) -> dict[tuple[int, int], Prefix]:
        """What window pages hold when the copies have been made."""
        self.update()
        cells = dict(self.window_cells)
        for source, target, count in self.copies:
            for slot in range(count):
                cells[target, slot] = cells[source, slot]
        return cells

    def write(self, seq: Any, start: int) -> None:
        super().write(seq, start)
        self.window_cells, self.copies = self.copied(), []
        tokens = tuple(seq.tokens)
        for position in range(start, seq.length):
            window = self.table[int(seq.pages[position // self.page_size])]
            assert window >= 0, "a new token has no place for its K and V"
            self.window_cells[window, position % self.page_size] = tokens[: position + 1]

    def verify(self, seq: Any) -> None:
        super().verify(seq)
        cells, tokens, end = self.copied(), tuple(seq.tokens), seq.committed_len
        for position in range(max(0, end + 1 - self.window_size), end):
            page, slot = int(seq.pages[position // self.page_size]), position % self.page_size
            window = self.table[page]
            assert window >= 0, f"position {position} of {seq} is seen and has no window page"
            assert cells[window, slot] == tokens[: position + 1], f"position {position} of {seq}"

    def truncate(self, seq: Any, length: int) -> None:
        tokens = tuple(seq.tokens)
        try:
            seq.truncate(length)
        except OutOfPages:
            return
        assert seq.length <= length
        assert tuple(seq.tokens) == tokens[: seq.length]
        assert length < len(tokens) or seq.length == length
        self.copy_page_prefixes(seq)
        self.verify(seq)

    def check_lookup(self, answer: Lookup, tokens: Prefix, namespace: str) -> None:
        self.update()
        cached = self.longest_cached(tokens, namespace)
        assert answer.cached_len <= cached
        if self.page_size == 1:
            usable = self.longest_usable(tokens[:cached], namespace)
            assert answer.cached_len == usable
            assert (answer.reason == "window_evicted") == (usable < cached)
        if answer.reason == "window_evicted":
            assert answer.position == cached

    def longest_usable(self, tokens: Prefix, namespace: str) -> int:
        path = next(
            (cells for path, cells in self.paths(namespace) if path[: len(tokens)] == tokens), []
        )
        for length in range(len(tokens), 0, -1):
            seen = path[max(0, length + 1 - self.window_size) : length]
            if all(self.table[page] >= 0 for page, _ in seen):
                return length
        return 0


class LateWindowWorld(LateWorld, WindowWorld):
    pass


class CrowdedWindowWorld(WindowWorld):
    """Hardly more window pages than a few sequences see."""

    num_window_pages, window_size = 8, 4

"""Layers beside K/V pages: recurrent states and window pages, plugged into a `RadixCache`.

Both implement `RadixLayers` of cache/radix/layers.py.
"""

from radixserve.cache_layers.recurrent import RecurrentLayers
from radixserve.cache_layers.windows import WindowedLayers

__all__ = ["RecurrentLayers", "WindowedLayers"]

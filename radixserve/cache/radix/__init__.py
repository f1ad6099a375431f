"""The token-level radix tree: `RadixCache` and its parts.

lookup.py matches prompts, radix_tree.py holds nodes and their locks, sequence.py publishes tokens,
eviction.py and sessions.py order the evictions. layers.py is the plug point for layers beside K/V.
"""

"""The token-level radix tree: `RadixCache` and its parts.

lookup.py matches prompts, radix_tree.py holds nodes and their locks, sequence.py publishes tokens,
eviction.py orders the evictions. Plug points: retention.py for what is kept longer, layers.py for
layers beside K/V.
"""

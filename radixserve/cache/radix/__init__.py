"""The token-level radix tree: `RadixCache` and its parts.

lookup.py matches prompts, radix_tree.py holds nodes and their locks, sequence.py publishes tokens,
eviction.py and sessions.py order the evictions. windows.py serves sliding-window layers, states.py
and checkpoint_order.py serve recurrent layers.
"""

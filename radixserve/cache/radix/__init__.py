"""The token-level radix tree: `RadixCache` and its parts."""

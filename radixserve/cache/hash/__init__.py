"""Whole blocks found by chained hashes: `HashBlockCache` and its parts."""

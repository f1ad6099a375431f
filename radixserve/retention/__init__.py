"""What a radix tree keeps longer than recency alone would: sessions with leases, expected returns.

They plug into the tree as a `RetentionPolicy` (cache/radix/retention.py) and as an eviction policy.
"""

from radixserve.retention.sessions import SessionRetention

__all__ = ["SessionRetention"]

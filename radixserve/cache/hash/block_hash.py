"""Keys of blocks: the hash of a block's tokens together with the key of the block before it.

    key[-1] = H(namespace)      key[i] = H(key[i - 1] + int32 bytes of block i's tokens)

So a key identifies the whole prefix up to its block's end, as in vLLM and nano-vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from weakref import WeakValueDictionary

from radixserve.checks import check_choice
from radixserve.errors import InvalidRequest

Digest = Callable[[bytes], bytes]


def make_digest(hash_algorithm: str) -> Digest:
    """Returns the hash of that name: sha256 (32 bytes), or xxh3 (16 bytes, needs the package
    xxhash).

    Raises InvalidRequest for another name and where xxhash is missing.
    """
    check_choice("hash_algorithm", hash_algorithm, ("sha256", "xxh3"))
    if hash_algorithm == "sha256":
        return _sha256()
    try:
        from xxhash import xxh3_128_digest
    except ImportError:
        raise InvalidRequest(
            'hash_algorithm "xxh3" needs the package xxhash (pip install xxhash); '
            '"sha256" needs none'
        ) from None
    digest: Digest = xxh3_128_digest
    return digest


def _sha256() -> Digest:
    fresh = sha256().copy  # half the time of a new one

    def digest(data: bytes) -> bytes:
        hashing = fresh()
        hashing.update(data)
        return hashing.digest()

    return digest


class BlockChain:
    """A prompt's whole blocks, and their keys, computed on demand."""

    __slots__ = ("__weakref__", "_digest", "data", "keys", "num_blocks", "width")

    def __init__(self, digest: Digest, root_key: bytes, data: bytes, width: int) -> None:
        """`data`: int32 bytes, a multiple of `width`, the bytes of a block."""
        self.data = data
        self.width = width
        self.num_blocks = len(data) // width
        self.keys = [root_key]  # keys[i + 1] is the key of block i
        self._digest = digest

    def key(self, index: int) -> bytes:
        """Returns the key of block `index`; hashes from the last known key."""
        keys, width = self.keys, self.width
        while len(keys) <= index + 1:
            start = (len(keys) - 1) * width
            keys.append(self._digest(keys[-1] + self.data[start : start + width]))
        return keys[index + 1]


class ChainMemo:
    """Chains that are still referenced: a waiting request's prompt is hashed once."""

    def __init__(self, digest: Digest, width: int) -> None:
        self._digest = digest
        self._width = width
        # keyed by length and last block: cheap to compare, seldom equal
        self._chains: WeakValueDictionary[tuple[bytes, int, bytes], BlockChain]
        self._chains = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._chains)

    def root_key(self, namespace: str) -> bytes:
        return self._digest(b"namespace " + namespace.encode("utf-8", "surrogatepass"))

    def get(self, root_key: bytes, data: bytes) -> BlockChain:
        """Returns the chain of the whole blocks of `data`. O(len(data)) to copy and compare."""
        rest = len(data) % self._width
        if rest:
            data = data[:-rest]
        name = root_key, len(data), data[-self._width :]
        chain = self._chains.get(name)
        if chain is None or chain.data != data:
            chain = BlockChain(self._digest, root_key, data, self._width)
            self._chains[name] = chain
        return chain

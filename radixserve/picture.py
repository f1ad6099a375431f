"""`Picture`: a picture of a prompt, as requests, the engine and the runner pass it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from radixserve.arrays import IntArray


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """One of all pictures with the same pixels. `PictureTable` (images/table.py) makes them.

    Its rows in a prompt have the token ids [first_id, first_id + num_rows), outside the vocabulary.
    No other picture of the process ever has these.
    """

    digest: bytes  # SHA-256 of what the model's processor makes of it
    first_id: int
    num_rows: int  # tokens of the prompt whose embeddings the vision tower computes
    prompt_ids: tuple[int, ...]  # its tokens in a prompt: its rows, and the marks around them
    placeholder_id: int  # the token that the model's own tokenizer has for each row
    inputs: Mapping[str, NDArray[Any]]  # of the vision tower
    size: tuple[int, int]  # width and height in pixels, before it was processed

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())

    def __repr__(self) -> str:
        return f"Picture({self.digest.hex()})"

    def __copy__(self) -> Picture:
        return self

    def __deepcopy__(self, memo: object) -> Picture:
        del memo
        return self


class Pictures(Protocol):
    """What the text side needs of pictures. May be used from any thread."""

    @property
    def marker(self) -> str:
        """What a chat template writes in the place of a picture: one special token."""
        ...

    @property
    def marker_id(self) -> int:
        """The marker's token."""
        ...

    def read_part(self, part: Mapping[str, Any]) -> Picture:
        """Returns the picture of a message's part. Raises InvalidRequest."""
        ...

    def check_count(self, count: int) -> None:
        """Raise InvalidRequest if a prompt may not have so many pictures."""
        ...

    def by_digest(self, digest: bytes) -> Picture:
        """Raises InvalidRequest for a picture that is not kept any more."""
        ...

    def in_tokens(self, token_ids: IntArray) -> tuple[Picture, ...]:
        """Returns the pictures that have rows among the tokens. Raises InvalidRequest for ids of
        none."""
        ...

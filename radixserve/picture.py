"""`Picture`: a picture of a prompt, as requests, the engine and the runner pass it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
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
    around: tuple[str, str] = ("", "")  # text before and after `prompt_ids`, which is tokenised
    # with what stands beside it

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Its rows that follow each other in a prompt, without a mark between: of each such part
        the first id, and the one after its last."""
        ids = np.array(self.prompt_ids, np.int64)
        is_row = np.concatenate(([False], ids >= self.first_id, [False]))
        is_row[1:-1] &= ids < self.first_id + self.num_rows
        starts, ends = np.flatnonzero(np.diff(is_row.astype(np.int8))).reshape(-1, 2).T
        return tuple(zip(ids[starts].tolist(), (ids[ends - 1] + 1).tolist(), strict=True))

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


class PromptPictures(Protocol):
    """Reads the pictures of one prompt, which are bounded together. Used by one thread."""

    def open(self, part: Mapping[str, Any]) -> Callable[[], Picture]:
        """Read the file of a message's part. Returns what decodes it and returns the picture. Both
        raise InvalidRequest, also where the pictures so far are together too many or too large."""
        ...

    def note(self, picture: Picture) -> None:
        """Count a picture that was read before. Raises InvalidRequest."""
        ...


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

    def of_prompt(self, max_rows: int | None = None, tenant: str = "") -> PromptPictures:
        """Returns a reader for the pictures of one prompt, whose rows are so many at most, sent by
        a tenant."""
        ...

    def check_senders(self, pictures: Sequence[Picture], tenant: str) -> None:
        """Raise InvalidRequest for a picture of other tenants, where there are several."""
        ...

    def by_digest(self, digest: bytes) -> Picture:
        """Raises InvalidRequest for a picture that is not kept any more."""
        ...

    def in_tokens(self, token_ids: IntArray) -> tuple[Picture, ...]:
        """Returns the pictures that have rows among the tokens. Raises InvalidRequest for ids of
        none."""
        ...

    def uncut_parts(
        self, token_ids: IntArray, pictures: Sequence[Picture]
    ) -> tuple[tuple[int, int], ...]:
        """Returns the parts [start, end) of a prompt with these pictures that one step computes
        whole, see `Request.uncut`. Raises InvalidRequest for rows without those that they see."""
        ...

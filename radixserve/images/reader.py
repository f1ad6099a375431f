"""`PictureReader`: from the parts of messages to pictures with ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest
from radixserve.images.decoding import ImageLimits, decode_image, file_key
from radixserve.images.processor import PictureProcessor
from radixserve.images.sources import FetchUrl, read_source
from radixserve.images.table import PictureTable, Processed, whole_runs
from radixserve.picture import Picture


class PictureReader:
    """See `Pictures`. Reading takes milliseconds for each picture that is not known yet: call it
    in a thread where others wait."""

    def __init__(
        self,
        processor: PictureProcessor,
        table: PictureTable,
        fetch: FetchUrl | None = None,
        *,
        has_files: bool = True,
        see_each_other: bool = False,
    ) -> None:
        """fetch: None: http is refused. has_files: paths of this machine, and images in memory,
        may be given. see_each_other: rows of a picture do in this model."""
        self.table = table
        self._see_each_other = see_each_other
        self.limits = ImageLimits()
        self._processor, self._fetch, self._has_files = processor, fetch, has_files

    def of_callers(self, fetch: FetchUrl | None) -> PictureReader:
        """Returns a reader for callers of other machines, with the same pictures."""
        return PictureReader(
            *(self._processor, self.table, fetch),
            has_files=False,
            see_each_other=self._see_each_other,
        )

    @property
    def marker(self) -> str:
        return self._processor.marker

    @property
    def marker_id(self) -> int:
        return self._processor.marker_id

    def read_part(self, part: Mapping[str, Any]) -> Picture:
        most = self.limits.max_bytes
        given = read_source(part, most, self._fetch, has_files=self._has_files)
        process = partial(self._process, given)
        key = file_key(given)
        return self.table.add(process()) if key is None else self.table.of_file(key, process)

    def check_count(self, count: int) -> None:
        if count > self.limits.max_pictures:
            raise InvalidRequest(
                f"the prompt has more than {self.limits.max_pictures} pictures, which is the most"
            )

    def by_digest(self, digest: bytes) -> Picture:
        return self.table.by_digest(digest)

    def in_tokens(self, token_ids: IntArray) -> tuple[Picture, ...]:
        return self.table.in_tokens(token_ids)

    def uncut_parts(
        self, token_ids: IntArray, pictures: Sequence[Picture]
    ) -> tuple[tuple[int, int], ...]:
        return whole_runs(token_ids, pictures) if self._see_each_other else ()

    def _process(self, given: Any) -> Processed:
        return self._processor.process(decode_image(given, self.limits))

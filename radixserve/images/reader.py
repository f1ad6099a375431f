"""`PictureReader`: from the parts of messages to pictures with ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest
from radixserve.images.decoding import ImageLimits, decode_image, file_key, open_image
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
        self.has_tenants = False  # who may use those pictures alone that they have sent
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

    def of_prompt(self, max_rows: int | None = None, tenant: str = "") -> PromptPictureReader:
        return PromptPictureReader(self, max_rows, tenant)

    def read_part(self, part: Mapping[str, Any]) -> Picture:
        """Returns the picture of a part alone. Raises InvalidRequest."""
        return self.of_prompt().open(part)()

    def read_file(self, part: Mapping[str, Any], spent_s: float) -> Any:
        """Returns the bytes of a part's file, or the image that it has in memory. spent_s: see
        `FetchUrl`. Raises InvalidRequest."""
        most = self.limits.max_bytes
        return read_source(part, most, self._fetch, spent_s, has_files=self._has_files)

    def process(self, image: Any) -> Processed:
        """image: opened, of PIL. Raises InvalidRequest."""
        return self._processor.process(decode_image(image))

    def by_digest(self, digest: bytes) -> Picture:
        return self.table.by_digest(digest)

    def in_tokens(self, token_ids: IntArray) -> tuple[Picture, ...]:
        return self.table.in_tokens(token_ids)

    def check_senders(self, pictures: Sequence[Picture], tenant: str) -> None:
        if self.has_tenants:
            self.table.check_senders(pictures, tenant)

    def uncut_parts(
        self, token_ids: IntArray, pictures: Sequence[Picture]
    ) -> tuple[tuple[int, int], ...]:
        return whole_runs(token_ids, pictures) if self._see_each_other else ()


class PromptPictureReader:
    """See `PromptPictures`. Files are opened, and their sizes known, before any is decoded."""

    def __init__(self, reader: PictureReader, max_rows: int | None, tenant: str) -> None:
        self._reader, self._max_rows, self._tenant = reader, max_rows, tenant
        self._num_pictures = self._num_bytes = self._num_pixels = self._num_rows = 0
        self._spent_s = 0.0

    def open(self, part: Mapping[str, Any]) -> Callable[[], Picture]:
        limits, table = self._reader.limits, self._reader.table
        self._count_picture()
        began = time.monotonic()
        with table.refusing("source"):
            given = self._reader.read_file(part, self._spent_s)
        self._spent_s += time.monotonic() - began
        key = file_key(given)
        if key is not None:
            self._num_bytes += len(given)
            self._check("bytes", self._num_bytes, limits.max_total_bytes)
        if key is not None and (known := table.known_file(key)) is not None:
            self._count_pixels(known.size)
            return partial(self._counted, known)
        with table.refusing("image"):
            image = open_image(given, limits)
        self._count_pixels(image.size)
        process = partial(self._reader.process, image)

        def decode() -> Picture:
            with table.refusing("image"):
                picture = table.add(process()) if key is None else table.of_file(key, process)
            return self._counted(picture)

        return decode

    def note(self, picture: Picture) -> None:
        self._count_picture()
        self._counted(picture)

    def _count_picture(self) -> None:
        self._num_pictures += 1
        limit = self._reader.limits.max_pictures
        if self._num_pictures > limit:
            raise self._refusal(f"the prompt has more than {limit} pictures")

    def _count_pixels(self, size: tuple[int, int]) -> None:
        self._num_pixels += size[0] * size[1]
        self._check("pixels", self._num_pixels, self._reader.limits.max_total_pixels)

    def _counted(self, picture: Picture) -> Picture:
        self._num_rows += picture.num_rows
        self._reader.table.note_sender(picture, self._tenant)
        if self._max_rows is not None:
            self._check("tokens", self._num_rows, self._max_rows)
        return picture

    def _check(self, noun: str, number: int, limit: int) -> None:
        if number > limit:
            raise self._refusal(
                f"the pictures of the prompt have together more than {limit} {noun}"
            )

    def _refusal(self, message: str) -> InvalidRequest:
        self._reader.table.note_refused("prompt")
        return InvalidRequest(f"{message}, which is the most")

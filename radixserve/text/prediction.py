"""`PredictionFollower`: the place of an answer in the text that its caller expects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixserve.arrays import IntArray
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.text.token_search import find_first

LONGEST_MATCH, SHORTEST_MATCH = 4, 2  # tokens by which a place in the prediction is found again
NEAR_TOKENS = 64  # behind the place that was left, within which the shortest match counts


class PredictionFollower:
    """The place of an answer in its prediction. A function of the two texts alone, in whatever
    pieces the answer comes."""

    def __init__(self, prediction: IntArray) -> None:
        self._text = prediction.tobytes()
        self._ids: list[int] = prediction.tolist()
        self._is_matched = bytearray(len(self._ids))
        self._tail: list[int] = []  # last tokens of the answer
        self._place = (
            0  # index of the token that is expected next, or around which it is looked for
        )
        self._is_lost = False
        self.num_seen = 0  # tokens of the answer

    @property
    def num_matched(self) -> int:
        """Tokens of the prediction that the answer has in their places."""
        return self._is_matched.count(1)

    def expected(self, most: int) -> list[int]:
        """Returns up to `most` tokens that come next in the prediction."""
        return [] if self._is_lost else self._ids[self._place : self._place + most]

    def push(self, token_ids: Iterable[int]) -> None:
        """Follow further tokens of the answer."""
        for token_id in token_ids:
            self.num_seen += 1
            self._tail = [*self._tail[1 - LONGEST_MATCH :], token_id]
            if not self._is_lost and self._expects(self._place, token_id):
                self._match(self._place)
            else:
                self._look_again(token_id)

    def _expects(self, place: int, token_id: int) -> bool:
        return 0 <= place < len(self._ids) and self._ids[place] == token_id

    def _match(self, place: int) -> None:
        self._is_matched[place] = 1
        self._place, self._is_lost = place + 1, False

    def _look_again(self, token_id: int) -> None:
        """The answer has left the prediction: look for its last tokens, nearby and then anywhere;
        else take the token as one in place of the expected one."""
        place = self._place
        for count in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
            found = self._find(self._tail[-count:], max(0, place - count))
            is_near = 0 <= found <= place + NEAR_TOKENS
            if found < 0 and count > SHORTEST_MATCH:
                found = self._find(self._tail[-count:], 0)
            if found >= 0 and (is_near or count > SHORTEST_MATCH):
                self._match(found - 1)
                return
        if self._is_lost:
            return
        if place > len(self._ids):
            self._is_lost = True
        elif not place or self._is_matched[place - 1]:
            self._place = place + 1
        elif self._ids[place - 1] == token_id:
            self._match(place - 1)  # the token before was inserted
        else:
            self._is_lost = self.num_seen > 1  # two tokens in a row that were not expected

    def _find(self, token_ids: Sequence[int], start: int) -> int:
        """Returns the index after the first occurrence from `start` on; -1 without one."""
        data = b"".join(token_id.to_bytes(TOKEN_BYTES, "little") for token_id in token_ids)
        return find_first(self._text, data, start)


def count_matched(prediction: IntArray, answer: Iterable[int]) -> int:
    """Returns how many tokens of a prediction the answer has in their places."""
    follower = PredictionFollower(prediction)
    follower.push(answer)
    return follower.num_matched

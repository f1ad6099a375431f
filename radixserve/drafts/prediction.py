"""`Prediction`: drafts from the text that the caller expects, such as a file before an edit."""

from __future__ import annotations

from collections.abc import Sequence

from radixserve.drafts.source import DraftContext, DraftSource
from radixserve.text.prediction import PredictionFollower


class Prediction(DraftSource):
    """Follows `Request.prediction`, and finds its place again after each difference."""

    name = "prediction"
    first_odds = 0.8

    def __init__(self) -> None:
        self._followers: dict[str, PredictionFollower] = {}  # by request id

    def draft(self, context: DraftContext, most: int) -> Sequence[int]:
        prediction = context.request.prediction
        if prediction is None:
            return ()
        name = context.request.request_id
        follower = self._followers.get(name)
        if follower is None:
            follower = self._followers[name] = PredictionFollower(prediction)
        follower.push(context.output[follower.num_seen :].tolist())
        return follower.expected(most)

    def end(self, context: DraftContext) -> None:
        self._followers.pop(context.request.request_id, None)

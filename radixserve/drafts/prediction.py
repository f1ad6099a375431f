"""`Prediction`: drafts from the text that the caller expects, such as a file before an edit."""

from __future__ import annotations

from collections.abc import Sequence

from radixserve.drafts.source import DraftContext, DraftSource
from radixserve.text.prediction import PredictionFollower


class Prediction(DraftSource):
    """Follows `Request.prediction`, and finds its place again after each difference."""

    name = "prediction"
    first_odds = 0.8

    def draft(self, context: DraftContext, most: int) -> Sequence[int] | None:
        follower: PredictionFollower | None = context.kept.get(self)
        if follower is None:
            prediction = context.request.prediction
            if prediction is None:
                return None
            follower = context.kept[self] = PredictionFollower(prediction)
        follower.push(context.output[follower.num_seen :].tolist())
        return follower.expected(most)

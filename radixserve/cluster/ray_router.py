"""`ReplicaRequestRouter`: Ray Serve's side of the routing."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from radixserve.cluster import frontends


class ReplicaRequestRouter(RequestRouter):
    """Sends each call to the replica that it names; notifies the frontends of replica changes."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = [replica.replica_id.unique_id for replica in replicas]
        frontends.note(self._deployment_id.app_name, names)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The named replica. When it has gone, all of them: whichever gets the call refuses it."""
        name = pending_request.args[0] if pending_request is not None else ""
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        return [named or candidate_replicas]

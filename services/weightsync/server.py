"""The RPC faces: check, call, answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc

from services.weightsync.backends import Grant
from services.weightsync.relay import Relay
from services.weightsync.versions import State
from stretto import rpc
from stretto.errors import InvalidArgumentError
from stretto.v1 import weightsync_pb2 as pb
from stretto.v1 import weightsync_pb2_grpc as pb_grpc
from stretto.weights import layout as layouts
from stretto.weights import stream
from stretto.weights.layout import VersionId

SERVICE = "stretto.v1.WeightSyncService"
_STATES = {
    State.STAGING: pb.VERSION_STATE_STAGING,
    State.READY: pb.VERSION_STATE_READY,
    State.RETIRED: pb.VERSION_STATE_RETIRED,
}


class WeightSyncService(pb_grpc.WeightSyncServiceServicer):
    """Contracts: protos/stretto/v1/weightsync.proto."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def PreparePublish(self, request: pb.PreparePublishRequest, context: object) -> pb.PreparePublishResponse:  # noqa: N802
        id, layout = _publishable(request.id.trainer_epoch, request.id.version), layouts.read_layout(request.layout)
        prepared = await self._relay.prepare(id, layout, request.backends)
        return pb.PreparePublishResponse(
            backend=prepared.backend,
            slot_id=prepared.slot_id,
            socket_path=prepared.grant.endpoint,
            token=prepared.grant.token,
            already_ready=prepared.is_ready,
        )

    async def publish(self, messages: AsyncIterator[tuple[str, memoryview]], context: Any) -> pb.PublishResponse:
        """Publish, on messages that `stream` decoded."""
        first = await anext(aiter(messages), None)
        if first is None or not first[0]:
            raise InvalidArgumentError("the first message must name the slot")
        if len(first[1]):
            raise InvalidArgumentError("the first message names the slot only; data begins with the second")
        return pb.PublishResponse(received_bytes=await self._relay.receive(first[0], aiter(messages)))

    async def CommitPublish(self, request: pb.CommitPublishRequest, context: object) -> pb.CommitPublishResponse:  # noqa: N802
        id = _publishable(request.manifest.id.trainer_epoch, request.manifest.id.version)
        verify_s = await self._relay.commit(id, request.slot_id, request.manifest)
        return pb.CommitPublishResponse(verify_ms=verify_s * 1e3)

    async def Join(self, request: pb.JoinRequest, context: object) -> pb.JoinResponse:  # noqa: N802
        backend = self._relay.join(request.replica_id, request.backends, request.device_type)
        return pb.JoinResponse(backend=backend.name, socket_path=backend.endpoint)

    async def Watch(self, request: pb.WatchRequest, context: object) -> AsyncIterator[pb.WatchResponse]:  # noqa: N802
        async for newest in self._relay.watch(request.replica_id):
            yield pb.WatchResponse(newest=layouts.id_to_proto(newest))

    async def Acquire(self, request: pb.AcquireRequest, context: object) -> pb.AcquireResponse:  # noqa: N802
        if not request.operation_id:
            raise InvalidArgumentError("operation_id is empty")
        held = layouts.id_from_proto(request.held) if request.HasField("held") else None
        leased = self._relay.acquire(request.replica_id, request.operation_id, held)
        if leased is None:
            return pb.AcquireResponse()
        entry, lease, grant = leased.entry, leased.lease, leased.grant
        return pb.AcquireResponse(
            manifest=layouts.manifest(entry.id, entry.layout, entry.digests),
            lease_id=lease.id,
            lease_s=-self._relay.age_s(lease.deadline_s),
            backend=lease.backend,
            slot_id=lease.slot_id,
            **_reach(grant),
        )

    async def fetch(self, request: pb.FetchRequest, context: object) -> AsyncIterator[bytes]:
        """Fetch, in messages that `stream` encoded."""
        async for message in self._relay.send(request.lease_id, request.offset):
            yield message

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:  # noqa: N802
        was_valid = self._relay.release(request.lease_id, request.replica_id, request.error, request.loaded_digest)
        return pb.ReleaseResponse(was_valid=was_valid)

    async def GetStatus(  # noqa: N802
        self, request: pb.WeightSyncServiceGetStatusRequest, context: object
    ) -> pb.WeightSyncServiceGetStatusResponse:
        relay = self._relay
        available = dict.fromkeys(relay.backends, "yes")
        return pb.WeightSyncServiceGetStatusResponse(
            versions=[_version_status(relay, id) for id in sorted(relay.versions.entries)],
            readers=[_reader_status(relay, name) for name in sorted(relay.versions.readers)],
            resident_bytes=relay.resident_bytes(),
            backends={**available, **{name: f"no: {reason}" for name, reason in relay.missing.items()}},
        )


def _publishable(epoch: int, version: int) -> VersionId:
    if epoch < 1 or version < 0:
        raise InvalidArgumentError(f"trainer_epoch = {epoch}, version = {version}: must be at least 1 and 0")
    return VersionId(epoch, version)


def _reach(grant: Grant) -> dict[str, Any]:
    return {"socket_path": grant.endpoint, "token": grant.token}


def _version_status(relay: Relay, id: VersionId) -> pb.VersionStatus:
    entry = relay.versions.entries[id]
    return pb.VersionStatus(
        id=layouts.id_to_proto(id),
        state=_STATES[entry.state],
        nbytes=entry.layout.arena_bytes,
        digest=entry.digests.content if entry.digests else b"",
        num_leases=relay.versions.num_leases(id),
        ready_unix_s=time.time() - relay.age_s(entry.ready_at_s) if entry.digests else 0.0,
    )


def _reader_status(relay: Relay, replica_id: str) -> pb.ReaderStatus:
    reader = relay.versions.readers[replica_id]
    return pb.ReaderStatus(
        replica_id=replica_id,
        held=layouts.id_to_proto(reader.held) if reader.held is not None else None,
        backend=reader.backend,
        last_error=reader.last_error,
        last_heard_s=0.0 if reader.num_watches else relay.age_s(reader.last_heard_s),
    )


class _Collected:
    """Stands in for a server while the generated code registers its handlers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers |= handlers

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same handlers again."""


def _handlers(service: WeightSyncService) -> dict[str, Any]:
    """The generated handlers, but for the two streams: there protobuf would copy every chunk twice."""
    collected = _Collected()
    pb_grpc.add_WeightSyncServiceServicer_to_server(service, cast(Any, collected))
    return collected.handlers | {
        "Publish": grpc.stream_unary_rpc_method_handler(
            cast(Any, service.publish),
            request_deserializer=stream.decode_publish,
            response_serializer=pb.PublishResponse.SerializeToString,
        ),
        "Fetch": grpc.unary_stream_rpc_method_handler(cast(Any, service.fetch), request_deserializer=pb.FetchRequest.FromString),
    }


async def serve(listen: str, relay: Relay) -> rpc.Server:
    """A server on "host:port" in front of `relay`."""
    handlers = _handlers(WeightSyncService(relay))
    generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
    return await rpc.serve(listen, lambda server: server.add_generic_rpc_handlers((generic,)), [SERVICE])

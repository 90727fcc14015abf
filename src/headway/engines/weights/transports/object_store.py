"""Buckets as objects in the cluster's object store: the sender puts them there, receivers get them when they like."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.engines.weights.protocols import Header, OutgoingWeights, StoredVersion, WeightSink
from headway.engines.weights.transports.links import EndContext, TransportAddress
from headway.errors import UpdateFailed, boundary


def make_link(meeting: TransportAddress) -> None:
    """Make a link without data: both ends reach the object store and need to know nothing else."""


def open_sender(link: None, here: EndContext) -> ObjectStoreSender:
    return ObjectStoreSender(here)


def open_receiver(link: None, name: str, here: EndContext) -> ObjectStoreReceiver:
    return ObjectStoreReceiver(here, name)


class ObjectStoreSender:
    """The trainer's end of the object store (`WeightSender`). The objects live as long as somebody has the parcel.

    Memory: in the store, one set of weights for each version whose parcel is still held; here, one bucket.
    """

    def __init__(self, here: EndContext) -> None:
        self._here = here

    def send(self, version: int, weights: OutgoingWeights) -> StoredVersion:
        headers: list[Header] = []
        handles: list[Any] = []
        for chunk in weights:
            # A copy: a store in this very process keeps the object itself, and the payload's memory is used again.
            payload = chunk.payload.to("cpu", copy=True).numpy()
            with boundary(f"version {version}: the object store did not take bucket {len(handles)}", UpdateFailed):
                handles.append(self._here.put(payload))
            headers.append(chunk.header)
        return StoredVersion(version, tuple(headers), tuple(handles), weights.digests)

    def close(self) -> None:
        """Do nothing: objects are freed with their last handle."""


class ObjectStoreReceiver:
    """A receiver's end of the object store (`WeightReceiver`)."""

    def __init__(self, here: EndContext, name: str) -> None:
        self._here = here
        self._name = name

    def receive(self, version: int, sink: WeightSink, parcel: StoredVersion | None) -> None:
        pieces, digests = contents(parcel, version, self._name)
        for header, handle in pieces:
            index = header.index
            with boundary(f"version {version}: {self._name} cannot get bucket {index} from the store", UpdateFailed):
                (payload,) = self._here.fetch([handle])
            room = sink.room(header)
            if len(payload) != room.numel():
                raise UpdateFailed(
                    f"version {version}: bucket {index} has {len(payload)} bytes in the object store, "
                    f"{room.numel()} were announced"
                )
            np.copyto(room.numpy(), payload)
            sink.filled(header)
        sink.ended(digests)

    def close(self) -> None: ...


def contents(parcel: StoredVersion | None, version: int, name: str) -> tuple[list[tuple[Header, Any]], tuple[int, ...]]:
    """Headers with contents, and the digests, of the parcel that ``name`` was given for ``version``.

    Raises `UpdateFailed` for a parcel of another version.
    """
    if parcel is None or parcel.version != version:
        given = "nothing" if parcel is None else f"version {parcel.version}"
        raise UpdateFailed(f"{name} was to receive version {version}, but {given} was sent")
    return list(zip(parcel.headers, parcel.contents, strict=True)), parcel.digests

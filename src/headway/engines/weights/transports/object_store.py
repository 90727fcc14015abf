"""Buckets as objects in the cluster's object store: the sender puts them there, receivers get them when they like."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headway.engines.weights.protocols import Chunk, Header, StoredReceiver, StoredSender
from headway.errors import UpdateFailed, boundary


class ObjectStoreSender(StoredSender):
    """The trainer's end of the object store (`WeightSender`). The objects live as long as a `StoredVersion` names them.

    Memory: in the store, one set of weights for each version whose `StoredVersion` is still held; here, one bucket.
    """

    def _put(self, version: int, chunk: Chunk) -> Any:
        # A copy: a store in this very process keeps the object itself, and the payload's memory is used again.
        payload = chunk.payload.to("cpu", copy=True).numpy()
        index = chunk.header.index
        with boundary(f"version {version}: the object store did not take bucket {index}", UpdateFailed):
            return self._here.put(payload)


class ObjectStoreReceiver(StoredReceiver):
    """A receiver's end of the object store (`WeightReceiver`)."""

    def _get(self, version: int, header: Header, content: Any, room: torch.Tensor) -> None:
        index = header.index
        with boundary(f"version {version}: {self._name} cannot get bucket {index} from the store", UpdateFailed):
            (payload,) = self._here.fetch([content])
        if len(payload) != room.numel():
            raise UpdateFailed(
                f"version {version}: bucket {index} has {len(payload)} bytes in the object store, "
                f"{room.numel()} were announced"
            )
        np.copyto(room.numpy(), payload)


open_sender, open_receiver = ObjectStoreSender, ObjectStoreReceiver

"""A stream of the device for what a receiving thread does, so that decoding does not wait for weights that arrive.

    default stream    decode ▷ decode ▷ decode ▷ decode ▷ load ▷ decode
    side stream          └▷ receive ▷ copy ▷ receive ▷ copy │ host waits, then reports the version as received

Work of one stream runs in order: buckets on the default stream would queue behind decoding steps, and steps behind
buckets. On a CPU there are no streams, and nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from headway.devices import DeviceStream as Stream
from headway.devices import kind_of


class SideStream:
    """A stream on ``device`` for a receiving thread, made when first used. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Stream | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run the work inside on the side stream; it has ended on the device when the block has.

        It begins behind what the default stream was given so far, which may still read the tensors that are written.
        Other streams need no event: they are only told of the tensors after the host has waited. For the same reason
        no memory is recorded for a second stream: what was taken inside is given back to the stream that used it, and
        no tensor of another stream can be freed and taken again while work here still writes it.
        """
        if self._stream is None:
            self._stream = kind_of(self._device).side_stream(self._device)
        if self._stream is None:
            yield
            return
        self._stream.wait_for_default()
        try:
            with self._stream.working():
                yield
        except BaseException:
            with suppress(RuntimeError):  # what went wrong first is the reason
                self._stream.synchronize()
            raise
        self._stream.synchronize()

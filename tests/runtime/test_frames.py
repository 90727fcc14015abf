"""Frames between two ends of a connection: which are sent when, and in which order."""

from __future__ import annotations

import asyncio
import socket

from headway.runtime.frames import Frame, FrameChannel


class Ends:
    """A channel, the socket at its other end, and what has come out of that since the last look."""

    def __init__(self) -> None:
        here, self.there = socket.socketpair()
        self.there.setblocking(False)
        self.channel = FrameChannel(here, lambda frame: None, lambda: None)

    def arrived(self) -> bytes:
        try:
            return self.there.recv(1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self.channel.close()
        self.there.close()


FRAMES = [Frame(1, number, 0, bytes([number]) * number) for number in range(1, 5)]
PACKED = [frame.packed() for frame in FRAMES]


async def test_frames_that_are_sent_soon_go_together_at_the_end_of_the_turn() -> None:
    ends = Ends()
    ends.channel.send_soon(FRAMES[0])
    ends.channel.send_soon(FRAMES[1])
    assert ends.arrived() == b""
    await asyncio.sleep(0)
    assert ends.arrived() == PACKED[0] + PACKED[1]
    ends.close()


async def test_a_frame_that_is_sent_at_once_comes_behind_those_that_were_to_be_sent_soon() -> None:
    ends = Ends()
    ends.channel.send_soon(FRAMES[0])
    ends.channel.send(FRAMES[1])
    ends.channel.send_soon(FRAMES[2])
    assert ends.arrived() == PACKED[0] + PACKED[1]
    await asyncio.sleep(0)
    assert ends.arrived() == PACKED[2]
    ends.close()


async def test_what_was_to_be_sent_soon_is_sent_before_the_end_is_closed() -> None:
    ends = Ends()
    ends.channel.send_soon(FRAMES[3])
    ends.channel.close()
    ends.channel.send_soon(FRAMES[0])
    await asyncio.sleep(0)
    assert ends.arrived() == PACKED[3]
    ends.close()


async def test_what_a_full_socket_does_not_take_follows_in_order() -> None:
    ends = Ends()
    large = Frame(1, 9, 0, b"x" * (1 << 22))
    ends.channel.send_soon(large)
    ends.channel.send_soon(FRAMES[0])
    got = b""
    async with asyncio.timeout(30):
        while len(got) < len(large.packed()) + len(PACKED[0]):
            await asyncio.sleep(0)
            got += ends.arrived()
    assert got == large.packed() + PACKED[0]
    ends.close()

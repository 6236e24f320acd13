"""Messages on the socket beside shared memory: how they are cut out of what comes."""

from __future__ import annotations

import pytest

from andon.protocol.limits import MAX_MESSAGE_BYTES
from andon.wire.fields import FrameError
from andon.wire.socket_frames import SocketFrames, socket_frame


@pytest.mark.parametrize("step", [1, 3, 100])
def test_messages_are_whole_however_they_arrive(step: int) -> None:
    messages = [b"one", b"", b"three and more"]
    data = b"".join(map(socket_frame, messages))
    frames, taken = SocketFrames(), []

    for at in range(0, len(data), step):
        frames.put(data[at : at + step])
        while frames.whole:
            taken.append(frames.take())

    assert taken == messages
    assert not len(frames)


def test_a_length_that_no_message_has_is_refused_before_the_message_is_there() -> None:
    frames = SocketFrames()
    frames.put((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))

    assert frames.whole
    with pytest.raises(FrameError, match="above the limit"):
        frames.take()

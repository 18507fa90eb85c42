"""Messages between the pipeline and the learner, and the errors that travel in them. Imports no torch.

On the wire: header length (4 bytes), payload length (8 bytes), both big-endian, then the header as UTF-8 JSON, then the
table as an Arrow IPC stream. A payload length of zero means no table.
"""

import json
import socket
import struct
from typing import Any

import pyarrow as pa


class LearnerError(ValueError):
    """The learner refused or failed a request, with the reason; it still answers."""


class NoOptimizerState(LearnerError):
    """The policy's directory has no optimizer state and a fresh optimizer was not asked for."""


class LearnerLost(ConnectionError):
    """The learner's process is gone, or was never there; the policy in its memory is lost."""


BY_NAME: dict[str, type[LearnerError]] = {error.__name__: error for error in (LearnerError, NoOptimizerState)}
"""The errors that travel from the learner to its client, by the name that is sent."""

KEPT_STATES = 2
"""Newest policies whose state a learner keeps in files of its machine."""


def state_file(policy_key: str, rank: int, size: int) -> str:
    """Return the name of the file in which a rank keeps weights and optimizer state of a policy."""
    return f"{policy_key}.{rank}-of-{size}.safetensors"


LENGTHS = struct.Struct("!IQ")
LONGEST_HEADER = 1 << 26
"""Bytes. A step's answer has 1.5 kB for each of its updates, which may be thousands. A longer header comes from a
program that does not speak this protocol."""


def send(connection: socket.socket, header: dict[str, Any], table: pa.Table | None = None) -> None:
    """Send one message. Raises OSError when the other end is gone."""
    text = json.dumps(header).encode()
    payload = b"" if table is None else _pack(table)
    # Two calls: joining them would copy the table, which may be gigabytes.
    connection.sendall(LENGTHS.pack(len(text), len(payload)) + text)
    connection.sendall(payload)


def receive(connection: socket.socket) -> tuple[dict[str, Any], pa.Table | None]:
    """Return the next message.

    Raises EOFError when the other end closed, also in the middle of a message, and ValueError when it sends no message.
    """
    num_text, num_payload = LENGTHS.unpack(_read(connection, LENGTHS.size))
    if num_text > LONGEST_HEADER:
        raise ValueError(f"a header of {num_text} bytes is none of ours")
    header = json.loads(_read(connection, num_text))
    if not num_payload:
        return header, None
    return header, pa.ipc.open_stream(pa.py_buffer(_read(connection, num_payload))).read_all()


def _pack(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _read(connection: socket.socket, size: int) -> bytearray:
    # Filled in place: parts that are joined at the end would hold a table twice.
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise EOFError(f"the connection closed after {filled} of {size} bytes")
        filled += count
    return data

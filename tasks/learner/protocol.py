"""Messages between the pipeline and the learner, and the errors that travel in them. Imports no torch.

Where both ends share a key, as between machines, a connection begins by either end's proof that it has it: the learner
sends NONCE bytes, the client as many and its proof, then the learner its own. Nothing is encrypted.

Then, for each message: the length (4 bytes, big-endian), then the message as UTF-8 JSON. Rows do not travel here: a
request names their place, and what the learner measured on tokens is in STATISTICS_FILE, beside the weights.
"""

import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from storage import errors
from storage.refs import Slice

LONGEST_WINDOW = 4096
"""Tokens of the longest window of attention that is proven when a run begins."""


class LearnerError(ValueError):
    """The learner refused or failed a request, with the reason; it still answers."""


class NoOptimizerState(LearnerError):
    """The policy's directory has no optimizer state and a fresh optimizer was not asked for."""


class LearnerLost(ConnectionError):
    """The learner's process is gone, or was never there; the policy in its memory is lost."""


OF_STORE = (
    errors.DamagedSlice,
    errors.InvariantBreach,
    errors.LayoutError,
    errors.SchemaError,
    errors.SliceExpired,
    errors.StoreError,
    errors.StoreUnavailable,
)
"""What reading rows from the store raises."""
BY_NAME: dict[str, type[ValueError]] = {error.__name__: error for error in (LearnerError, NoOptimizerState, *OF_STORE)}
"""The errors that travel from the learner to its client, by the name that is sent."""


def error_answer(error: LearnerError | errors.StoreError) -> dict[str, Any]:
    """Return the header that says what a request met."""
    return {"error": type(error).__name__, "message": [str(each) for each in error.args]}


def error_of(answer: Mapping[str, Any]) -> ValueError:
    """Return the error that an answer says."""
    return BY_NAME.get(answer["error"], LearnerError)(*answer["message"])


@dataclass(frozen=True)
class BatchReference:
    """Where the packed rows of a step lie: whoever reaches the store can read those that it needs."""

    store: str
    """The store's address: a directory that all ranks have, or a URL whose credentials are in their environment."""
    rows: tuple[Slice, ...]
    """The slices of the table `batches`, files and digests included."""
    images: tuple[Slice, ...] = ()
    """Those of `batch_images`; none where no row shows any."""
    experts: tuple[Slice, ...] = ()
    """Those of `batch_experts`; none where no experts were recorded."""

    def to_json(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        tables = {name: [each.to_row() for each in getattr(self, name)] for name in ("rows", "images", "experts")}
        return tables | {"store": self.store}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the reference that `to_json` made values of."""
        tables = (tuple(map(Slice.from_row, values[name])) for name in ("rows", "images", "experts"))
        return cls(values["store"], *tables)


STATISTICS_FILE = "token_statistics.arrow"
"""What a step measured on tokens, beside the weights that it made: whoever asked for the step takes it away."""

KEPT_STATES = 2
"""Newest policies whose state a learner keeps in files of its machine."""


def state_file(policy_key: str, rank: int, size: int) -> str:
    """Return the name of the file in which a rank keeps weights and optimizer state of a policy."""
    return f"{policy_key}.{rank}-of-{size}.safetensors"


RENDEZVOUS = "bound"
"""The backend by which torchrun's agents meet, see `tasks.learner.launcher`."""
KEY_VARIABLE = "STAGECOACH_LEARNER_KEY"
"""The variable by which a learner gets the key that its clients must have."""
NONCE = 32
"""Random bytes of either end, which make each proof good for one connection."""


def admit(connection: socket.socket, key: str) -> None:
    """Make sure that a client has the learner's key, and show it that this is the learner; without a key do nothing.

    Raises ValueError where it has another key, EOFError or another OSError where it went away or took too long.
    """
    if not key:
        return
    mine = secrets.token_bytes(NONCE)
    connection.sendall(mine)
    theirs, proof = bytes(_read(connection, NONCE)), bytes(_read(connection, NONCE))
    if not hmac.compare_digest(proof, _proof(key, "client", mine + theirs)):
        raise ValueError("a client without this learner's key")
    connection.sendall(_proof(key, "learner", mine + theirs))


def introduce(connection: socket.socket, key: str) -> None:
    """Show a learner that this client has its key, and make sure that it has it, too; without a key do nothing.

    Raises ConnectionRefusedError where it has another key, another OSError where it went away or took too long.
    """
    if not key:
        return
    try:
        theirs, mine = bytes(_read(connection, NONCE)), secrets.token_bytes(NONCE)
        connection.sendall(mine + _proof(key, "client", theirs + mine))
        proof = bytes(_read(connection, NONCE))
    except EOFError as error:
        raise ConnectionRefusedError("it closed the connection: it has another key") from error
    if not hmac.compare_digest(proof, _proof(key, "learner", theirs + mine)):
        raise ConnectionRefusedError("what answers there has not this run's key")


def _proof(key: str, end: str, nonces: bytes) -> bytes:
    # With the end's name: a client's proof, sent back to it, proves nothing.
    return hmac.digest(key.encode(), end.encode() + nonces, "sha256")


LENGTH = struct.Struct("!I")
LONGEST_MESSAGE = 1 << 28
"""Bytes. A step's answer has 1.5 kB for each of its updates, which may be thousands, and its request 0.3 kB for each
slice of its rows. A longer message comes from a program that does not speak this protocol."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message. Raises OSError when the other end is gone."""
    text = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(text)) + text)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Return the next message.

    Raises EOFError when the other end closed, also in the middle of a message, and ValueError when it sends no message.
    """
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    if length > LONGEST_MESSAGE:
        raise ValueError(f"a message of {length} bytes is none of ours")
    message: dict[str, Any] = json.loads(_read(connection, length))
    return message


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise EOFError(f"the connection closed after {filled} of {size} bytes")
        filled += count
    return data

"""The errors of a store, each saying what happened, where, what is safe and what to do.

Foreign errors (operating system, Arrow, Delta) become one of these at a named border and keep their cause.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

# A limit on file sizes is met like a full disk: nothing more can be written until somebody makes room.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Delta and Arrow pass on the words of the system and lose its number.
FULL_WORDS = ("No space left", "disk is full", "Disk quota exceeded", "File too large")
READ_ONLY_WORDS = ("Read-only file system", "readonly database")


class StoreError(ValueError):
    """Something about the store that its user can act on."""

    def __init__(self, what: str, where: str = "", safe: str = "", do: str = "") -> None:
        # All four go to the base class, so that an error survives pickling between processes.
        super().__init__(what, where, safe, do)
        self.what, self.where, self.safe, self.do = what, where, safe, do

    def __str__(self) -> str:
        parts = (("Where", self.where), ("Safe", self.safe), ("To do", self.do))
        return "\n".join([self.what, *(f"  {label}: {text}" for label, text in parts if text)])


class LayoutError(StoreError):
    """The root is not a store, or is one of another layout version."""


class SchemaError(StoreError):
    """Columns differ from the contract: name, order, type, nullability, or a null where none may be."""


class InvariantBreach(StoreError):
    """Rows contradict each other or the contract's meaning, though their columns have the right types."""


class DamagedSlice(StoreError):
    """Bytes on disk are not those that the ledger names."""


class PolicyConflict(StoreError):
    """Two different sets of weights claim one policy key."""


class PolicyAbsent(StoreError):
    """No complete policy of that key is in the store."""


class RunUnknown(StoreError):
    """No run of that name is in the store."""


class WorkRemoved(StoreError):
    """What a row of the ledger would name was removed from the store meanwhile."""


class SliceExpired(StoreError):
    """The rows of a slice were dropped on purpose, because they were older than its table keeps rows."""


class StoreUnavailable(StoreError):
    """The store cannot be read or written at the moment, or its log is damaged."""


class NoSpace(StoreError):
    """The disk, the quota or the file-size limit is used up."""


SAFE = "everything that the ledger names"


# Python's own error has no words; the last of these is a line of a service's log.
MEMORY_WORDS = (
    *("malloc of size", "can't start new thread", "Cannot allocate memory", "failed to map segment"),
    "| MemoryError",
)


def disk_refusal(what: str, error: BaseException, where: str = "", safe: str = SAFE) -> StoreError | None:
    """The error that says of another one that a disk takes nothing more; None where it means something else."""
    if isinstance(error, StoreError):
        return None
    where = where or str(getattr(error, "filename", None) or "")
    if getattr(error, "errno", None) in FULL or any(word in str(error) for word in FULL_WORDS):
        return NoSpace(f"{what}: no space left", where, safe, "free some space, then run the same again")
    if getattr(error, "errno", None) == errno.EROFS or any(word in str(error) for word in READ_ONLY_WORDS):
        do = "make it writable (the system's log says why it is not), then run the same again"
        return StoreError(f"{what}: the disk is read-only", where, safe, do)
    return None


def memory_refusal(error: BaseException | None) -> StoreError | None:
    """The error that says of another one, or of its causes, that memory is short; None if neither says so."""
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in MEMORY_WORDS):
            do = "free memory, or raise the limits of the shell (ulimit -v, -d, -u), then run the same again"
            return StoreError(f"memory or threads are short: {error}", "", SAFE, do)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def write_problem(directory: Path) -> str:
    """Say why a megabyte cannot be written in a directory; empty where it can. Nothing of it stays."""
    try:
        with TemporaryFile(dir=directory) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{directory} cannot be written: {error.strerror}"
    return ""


def is_foreign(error: BaseException) -> bool:
    """Say whether an error comes from a storage library: a Rust panic is a BaseException, which `Exception` misses."""
    modules = ("pyarrow", "deltalake", "polars", "_internal", "pyo3_runtime", "botocore")
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in modules


@contextmanager
def border(what: str, where: str, safe: str = SAFE) -> Iterator[None]:
    """Convert what the operating system, Arrow or Delta raise inside the block into a StoreError, once.

    Raises NoSpace where space ran out, StoreUnavailable for every other error of those libraries, unless it says that
    nothing may be written; errors of our own and of the language pass untouched.
    """
    try:
        yield
    except StoreError:
        raise
    except BaseException as error:
        if not is_foreign(error):
            raise
        if refusal := disk_refusal(what, error, where, safe):
            raise refusal from error
        advice = "check that the place can be reached and written, then run the same again"
        raise StoreUnavailable(f"{what}: {type(error).__name__}: {error}", where, safe, advice) from error

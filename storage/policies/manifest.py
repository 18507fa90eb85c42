"""Manifests of policies: the files of a complete policy with digests, and checks of directories against them."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from storage.delta.log import is_sealed, seal
from storage.errors import DamagedSlice
from storage.keys import canonical_json, sha256
from storage.refs import File
from storage.roots import check_inside

MANIFEST = "manifest.json"
FIELDS = {"weights_sha256", "below", "digest", "added", "files"}
BASE_FILE = "base.json"
"""File of a policy that is an adapter: `policy_key` and `weights_sha256` of the policy it is laid over."""


@dataclass(frozen=True)
class PolicyManifest:
    """A complete policy: its files with paths relative to its directory, the manifest not among them.

    `place` is its directory below the store's root; `added` are places of files that lie elsewhere, by path: an earlier
    version of the program added an optimizer's state to a policy in an object store.
    """

    policy_key: str
    weights_sha256: str
    files: tuple[File, ...]
    place: str
    added: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The size of its files, the manifest left out."""
        return sum(file.size for file in self.files)

    def place_of(self, file: File) -> str:
        """Where one of its files lies below the store's root."""
        return f"{self.added.get(file.path, self.place)}/{file.path}"


def manifest_text(weights_sha256: str, files: Sequence[File], below: str = "") -> str:
    """The text of a manifest; `below` is the place of the files relative to the policy's directory."""
    content = {"weights_sha256": weights_sha256, "below": below, "digest": "", "files": [vars(file) for file in files]}
    return seal(canonical_json(content)).decode()


def parse_manifest(text: bytes, policy_key: str) -> PolicyManifest:
    """The policy of a manifest's text.

    Raises DamagedSlice where the text is not what was written, StoreError where a file would lie outside of the policy.
    """
    top = f"policies/{policy_key}"
    where = f"{top}/{MANIFEST}"
    try:
        content = json.loads(text)
        # Those of this program before it took digests have none.
        if not content.keys() <= FIELDS or ("digest" in content and not is_sealed(text, content["digest"])):
            raise ValueError("its digest is another")
        files = tuple(File(**file) for file in content["files"])
        added = {path: top + below for path, below in content.get("added", {}).items()}
        policy = PolicyManifest(policy_key, content["weights_sha256"], files, top + content["below"], added)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged_file(f"{where} is not the manifest that was written: {error}", where) from error
    for path in (*(file.path for file in files), policy.place, *added.values()):
        check_inside(path, where)
    return policy


def digest_files(directory: Path) -> list[File]:
    """The files of a directory with sizes and digests, in order of path."""
    # The manifest is written last and cannot hold its own digest.
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    return [File(path.relative_to(directory).as_posix(), path.stat().st_size, file_sha256(path)) for path in paths]


def weights_digest(files: Sequence[File]) -> str:
    """The digest of the weights among files: the safetensors files but the optimizer's; all files if there are none."""
    # Optimizer state may be added later: what names the weights must not change with it.
    weights = [f for f in files if f.path.endswith(".safetensors") and not Path(f.path).name.startswith("optimizer")]
    return sha256(canonical_json([vars(file) for file in weights or files]).encode())


def adapter_base(directory: Path) -> str | None:
    """Return the key of the policy that the adapter in `directory` is laid over; None for weights that are whole."""
    file = directory / BASE_FILE
    return str(json.loads(file.read_text())["policy_key"]) if file.is_file() else None


def check_files(directory: Path, files: Sequence[File], verify: bool = True) -> None:
    """Raise DamagedSlice unless every file is there at its size and, but without `verify`, with its digest."""
    # Hashing leaves the interpreter to other threads, and large policies are several files.
    with ThreadPoolExecutor(HASHERS) as pool:
        problems = pool.map(lambda each: _file_problem(directory, each, verify), files)
        for file, wrong in zip(files, problems, strict=True):
            if wrong:
                raise damaged_file(f"{directory / file.path} {wrong}", str(directory))


def _file_problem(directory: Path, file: File, verify: bool) -> str:
    path = directory / file.path
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != file.size:
        return f"has {path.stat().st_size} bytes instead of {file.size}"
    if verify and file_sha256(path) != file.sha256:
        return "is not the file that was written: its SHA-256 differs"
    return ""


def damaged_file(what: str, where: str) -> DamagedSlice:
    """The error for a file of a policy that is not the one that was published."""
    advice = "put the file back from a copy, or run `stagecoach repair --deep`: it says what can be done again"
    return DamagedSlice(what, where, "every other policy and all tables", advice)


HASHERS = 4
"""Files that are hashed side by side."""
MAX_HASHED = 4096
"""Files whose digests stay in memory."""
_hashed: dict[tuple[int, ...], str] = {}
"""The digests of files that this process has read: to hash weights takes as long as to load them."""


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, read once in a process for as long as it is the same file, unchanged."""
    with open(path, "rb") as stream:
        state = _state(os.fstat(stream.fileno()))
        digest = _hashed.get(state) or hashlib.file_digest(stream, "sha256").hexdigest()
    _remember(state, digest)
    return digest


def remember_digests(directory: Path, files: Iterable[File]) -> None:
    """Take the digests of files that were just written into a directory from who wrote them, in place of reading them.

    A file of another size, or one that is not there, is left to be read. A file that is written to later is read again.
    """
    for file in files:
        path = directory / file.path
        if path.is_file() and path.stat().st_size == file.size:
            _remember(_state(path.stat()), file.sha256)


def _state(found: os.stat_result) -> tuple[int, ...]:
    # Weights are hashed when they are published, and again under another name: the path does not count. Who
    # writes into a file and sets its time back changes the time of that change.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _remember(state: tuple[int, ...], digest: str) -> None:
    _hashed[state] = digest
    for old in list(_hashed)[:-MAX_HASHED]:
        _hashed.pop(old, None)  # another thread may have been first

"""Policies: directories of weights, each complete or absent.

On a local root a directory is made beside its place and renamed into it; elsewhere its files are uploaded under a name
of their own and a manifest, written last, names them. A policy is there when its manifest is.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from storage.errors import DamagedSlice, PolicyAbsent, PolicyConflict, StoreError, StoreUnavailable, border
from storage.keys import canonical
from storage.refs import File
from storage.roots import Root, make_directory, synchronise
from storage.scratches import Scratches

MANIFEST = "manifest.json"
SCRATCHES = "policies/.scratch"
CHUNK = 1 << 22


@dataclass(frozen=True)
class Policy:
    """What a complete policy says of itself: files with paths relative to its directory, manifest not among them."""

    policy_key: str
    weights_sha256: str
    files: tuple[File, ...]
    place: str


class Policies:
    """Publishes directories of weights and finds them again."""

    def __init__(self, root: Root, cache: Path | None = None) -> None:
        self._root = root
        self._cache = cache or Path(tempfile.gettempdir()) / "stagecoach-policies"
        self._scratches = Scratches(self._cache / ".scratch" if root.directory is None else root.directory / SCRATCHES)

    def scratch(self, name: str) -> Path:
        """A new empty local directory to write weights in; on a local root on its disk, so that publishing renames.

        What a process that died left in its own is never looked at, and removed when the next one is made.
        """
        _check_key(name)
        with border("making a directory for weights", str(self._scratches.directory)):
            return self._scratches.make(name)

    def publish(self, directory: str | Path, policy_key: str, weights_sha256: str | None = None) -> Policy:
        """Make a directory of weights a policy, complete or not at all, and return what it consists of.

        A directory out of `scratch` is moved; any other is copied. Publishing a key again with equal weights returns
        the policy that is there, with files added that it lacks (an optimizer's); with other weights it raises
        PolicyConflict. `weights_sha256` defaults to the digest of the safetensors files but the optimizer's.
        Also raises NoSpace and StoreUnavailable.
        """
        _check_key(policy_key)
        source = Path(directory)
        with border(f"publishing policy {policy_key!r}", self._root.child(f"policies/{policy_key}")):
            files = tuple(_digested(source))
            if not files:
                raise StoreError(f"{source} holds no files", "", "nothing was written", "write the weights first")
            weights = weights_sha256 or _weights_digest(files)
            standing = self.find(policy_key) or self._place(source, policy_key, weights, files)
            if standing.weights_sha256 != weights:
                raise _conflict(standing, weights)
            if {file.path for file in files} - {file.path for file in standing.files}:
                standing = self._complete(source, standing, files)
        self.discard(source)
        return standing

    def discard(self, directory: str | Path) -> None:
        """Remove a directory out of `scratch`; any other, or one that is gone, is left alone."""
        self._scratches.discard(Path(directory))

    def find(self, policy_key: str) -> Policy | None:
        """The complete policy of a key, by its manifest; None where it is absent."""
        _check_key(policy_key)
        try:
            with border(f"looking for policy {policy_key!r}", self._root.address):
                manifest = json.loads(self._root.read(f"policies/{policy_key}/{MANIFEST}"))
        except StoreUnavailable as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise
        files = tuple(File.from_row(file) for file in manifest["files"])
        return Policy(policy_key, manifest["weights_sha256"], files, f"policies/{policy_key}{manifest['below']}")

    def directory(self, policy_key: str, verify: bool = False) -> Path:
        """A local directory with the complete policy: its own on a local root, else a verified download.

        Sizes are always checked, digests with `verify`. Raises PolicyAbsent, DamagedSlice.
        """
        policy = self.find(policy_key)
        if policy is None:
            advice = "check the key; if its training finished, the directory was removed by hand: train that step again"
            raise PolicyAbsent(f"there is no policy {policy_key!r}", self._root.address, "everything else", advice)
        local = self._download(policy) if self._root.directory is None else self._root.directory / policy.place
        _check_files(local, policy.files, verify)
        return local

    def names(self) -> list[str]:
        """The keys of all complete policies."""
        with border("listing policies", self._root.address):
            return [name for name in self._root.names("policies") if not name.startswith(".") and self.find(name)]

    def _place(self, source: Path, policy_key: str, weights_sha256: str, files: Sequence[File]) -> Policy:
        place = self._upload if self._root.directory is None else self._move
        place(source, policy_key, weights_sha256, files)
        standing = self.find(policy_key)
        assert standing is not None, "a policy just published is there"
        return standing

    def _complete(self, source: Path, standing: Policy, files: Sequence[File]) -> Policy:
        """Add the files that a standing policy of the same weights lacks; its manifest names them last."""
        if self._root.directory is None:
            return self._place(source, standing.policy_key, standing.weights_sha256, files)
        target = self._root.directory / standing.place
        names = {file.path for file in standing.files}
        added = [file for file in files if file.path not in names]
        for file in added:
            make_directory((target / file.path).parent)
            draft = target / f".{uuid4().hex}"
            shutil.copyfile(source / file.path, draft)
            _rename_durably(draft, target / file.path)
        draft = target / f".{uuid4().hex}"
        draft.write_text(_manifest(standing.weights_sha256, (*standing.files, *added), ""))
        _rename_durably(draft, target / MANIFEST)
        return self.find(standing.policy_key) or standing

    def _move(self, source: Path, policy_key: str, weights_sha256: str, files: Sequence[File]) -> None:
        assert self._root.directory is not None
        target = self._root.directory / "policies" / policy_key
        ours = source
        if source.parent != self._scratches.directory:
            ours = self.scratch(policy_key)
            try:
                shutil.copytree(source, ours, dirs_exist_ok=True)
            except OSError:
                self.discard(ours)  # a full disk is not to be kept full
                raise
        (ours / MANIFEST).write_text(_manifest(weights_sha256, files, ""))
        for path in (*ours.rglob("*"), ours):
            synchronise(path)
        try:
            os.rename(ours, target)
        except OSError:
            if not (target / MANIFEST).is_file():
                raise
            # another process published the key meanwhile; the caller compares the weights
        self.discard(ours)
        synchronise(target.parent)

    def _upload(self, source: Path, policy_key: str, weights_sha256: str, files: Sequence[File]) -> None:
        below = f"/{uuid4().hex[:12]}"
        for file in files:
            place = f"policies/{policy_key}{below}/{file.path}"
            with open(source / file.path, "rb") as read, self._root.writer(place) as write:
                shutil.copyfileobj(read, write, CHUNK)
        self._root.write(f"policies/{policy_key}/{MANIFEST}", _manifest(weights_sha256, files, below).encode())

    def _download(self, policy: Policy) -> Path:
        target = self._cache / f"{policy.policy_key}-{policy.weights_sha256[:16]}"
        if target.is_dir():
            return target
        ours = self.scratch(policy.policy_key)
        with border(f"downloading policy {policy.policy_key!r}", self._root.child(policy.place)):
            for file in policy.files:
                (ours / file.path).parent.mkdir(parents=True, exist_ok=True)
                place = f"{policy.place}/{file.path}"
                with self._root.files.open_input_stream(place) as read, open(ours / file.path, "wb") as write:
                    shutil.copyfileobj(read, write, CHUNK)
        _check_files(ours, policy.files, verify=True)
        try:
            os.rename(ours, target)
        except OSError:
            if not target.is_dir():
                raise
        self.discard(ours)
        return target


def _check_key(policy_key: str) -> None:
    if not policy_key.replace("-", "").replace("_", "").isalnum():
        raise StoreError(f"{policy_key!r} is no policy key", "", "nothing was touched", "use the key of finished work")


def _digested(directory: Path) -> list[File]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    return [File(path.relative_to(directory).as_posix(), path.stat().st_size, _sha256(path)) for path in paths]


def _weights_digest(files: Sequence[File]) -> str:
    weights = [f for f in files if f.path.endswith(".safetensors") and not Path(f.path).name.startswith("optimizer")]
    return hashlib.sha256(canonical([file.to_row() for file in weights or files]).encode()).hexdigest()


def _rename_durably(draft: Path, target: Path) -> None:
    synchronise(draft)
    os.replace(draft, target)
    synchronise(target.parent)


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _manifest(weights_sha256: str, files: Sequence[File], below: str) -> str:
    content: dict[str, Any] = {"weights_sha256": weights_sha256, "below": below}
    return canonical({**content, "files": [file.to_row() for file in files]})


def _check_files(directory: Path, files: Sequence[File], verify: bool) -> None:
    for file in files:
        path = directory / file.path
        wrong = ""
        if not path.is_file():
            wrong = "is missing"
        elif path.stat().st_size != file.size:
            wrong = f"has {path.stat().st_size} bytes instead of {file.size}"
        elif verify and _sha256(path) != file.sha256:
            wrong = "is not the file that was written: its SHA-256 differs"
        if wrong:
            advice = "put the file back from a copy, or remove the directory and train that step again"
            raise DamagedSlice(f"{path} {wrong}", str(directory), "every other policy and all tables", advice)


def _conflict(standing: Policy, weights_sha256: str) -> PolicyConflict:
    what = f"policy {standing.policy_key!r} is there with weights {standing.weights_sha256}, not {weights_sha256}"
    advice = "the same key must give the same weights: look for what the key leaves out (device, library, thread count)"
    return PolicyConflict(what, standing.place, "the policy that is there was not touched", advice)

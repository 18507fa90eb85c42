"""The policies of a store: directories of weights, each complete or absent.

On a local root a directory is made beside its place and renamed into it; elsewhere its files are uploaded under a name
of their own and a manifest, put last and only where none is, names them. A policy is there when its manifest is. What a
killed upload left is named by no manifest: nobody sees it, and maintenance removes it a day later.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

from storage.errors import DamagedSlice, PolicyAbsent, PolicyConflict, StoreError, StoreUnavailable, border
from storage.keys import sha256
from storage.policies.manifest import (
    BASE_FILE,
    MANIFEST,
    PolicyManifest,
    check_files,
    damaged_file,
    digest_files,
    manifest_text,
    parse_manifest,
    weights_digest,
)
from storage.policies.scratch import ScratchDirectories
from storage.refs import File
from storage.roots import Root, make_directory, make_private_directory, synchronise, user_directory

# 4 MiB at a time: weights never are in memory as a whole.
CHUNK = 1 << 22
COPY_SECONDS = 3600
"""How long a local copy stays after it was last asked for: whoever asked may be about to read it."""


class RemotePolicies:
    """Puts policies into an object store and keeps local copies of those asked for."""

    def __init__(self, root: Root, copies: Path, scratches: ScratchDirectories) -> None:
        self._root = root
        self._copies = copies
        self._scratches = scratches

    def put(self, source: Path, policy_key: str, weights_sha256: str, files: Sequence[File]) -> None:
        """Upload a new policy; where another process was first with the key, its policy stands and ours is removed."""
        below = self._upload(source, policy_key, files)
        name = f"policies/{policy_key}/{MANIFEST}"
        if self._root.create(name, manifest_text(weights_sha256, files, below).encode()):
            return
        # Where only the answer was lost, the manifest that stands is ours, and so are its files.
        if parse_manifest(self._root.read(name), policy_key).place != f"policies/{policy_key}{below}":
            for file in files:
                self._root.delete(f"policies/{policy_key}{below}/{file.path}")

    def copy(self, policy: PolicyManifest) -> Path:
        """A local directory with the policy's files, verified: an earlier copy, else a download."""
        target = self._copy_directory(policy)
        try:
            check_files(target, policy.files)
        except DamagedSlice:
            shutil.rmtree(target, ignore_errors=True)
            self._download(policy, target)
        with suppress(FileNotFoundError):
            os.utime(target)
        return target

    def adopt_copy(self, source: Path, policy: PolicyManifest) -> None:
        """Make a scratch directory with exactly the policy's files its local copy, which saves the download."""
        self._move_copy(source, self._copy_directory(policy))

    def remove_unfinished(self, hours: float) -> int:
        """Delete what killed uploads left more than `hours` ago; return how many objects and unfinished uploads.

        Those are objects below policies that no manifest names, and uploads in parts, of anything in the store, that
        never ended.
        """
        oldest = datetime.now(UTC) - timedelta(hours=hours)
        with border("looking for what killed uploads left", self._root.child("policies")):
            by_key: dict[str, list[str]] = {}
            for path in self._root.paths_older("policies", hours):
                key = path.split("/")[1]
                if not key.startswith("."):  # markers about policies, such as those of removed weights
                    by_key.setdefault(key, []).append(path)
            orphans = [path for key, paths in by_key.items() for path in sorted(set(paths) - self._named_files(key))]
            for path in orphans:
                self._root.delete(path)
            assert self._root.bucket is not None
            return len(orphans) + self._root.bucket.abort_uploads(oldest)

    def _upload(self, source: Path, policy_key: str, files: Sequence[File]) -> str:
        below = f"/{uuid4().hex[:12]}"
        for file in files:
            place = f"policies/{policy_key}{below}/{file.path}"
            with open(source / file.path, "rb") as read, self._root.writer(place) as write:
                shutil.copyfileobj(read, write, CHUNK)
        return below

    def _download(self, policy: PolicyManifest, target: Path) -> None:
        ours = self._scratches.make(policy.policy_key)
        try:
            with border(f"downloading policy {policy.policy_key!r}", self._root.child(policy.place)):
                for file in policy.files:
                    (ours / file.path).parent.mkdir(parents=True, exist_ok=True)
                    place = policy.place_of(file)
                    with self._root.files.open_input_stream(place) as read, open(ours / file.path, "wb") as write:
                        shutil.copyfileobj(read, write, CHUNK)
            check_files(ours, policy.files)
            self._move_copy(ours, target)
        finally:
            self._scratches.discard(ours)

    def _move_copy(self, ours: Path, target: Path) -> None:
        self._drop_old_copies()
        try:
            os.rename(ours, target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise

    def _drop_old_copies(self) -> None:
        for path in self._copies.iterdir():
            is_copy = path.is_dir() and not path.name.startswith(".")
            if is_copy and path.stat().st_mtime < time.time() - COPY_SECONDS:
                shutil.rmtree(path, ignore_errors=True)

    def _copy_directory(self, policy: PolicyManifest) -> Path:
        """The place of the local copy of exactly these files, which no other user can have put there."""
        make_private_directory(self._copies)
        text = manifest_text(policy.weights_sha256, policy.files)
        return self._copies / f"{policy.policy_key}-{sha256(text.encode())[:16]}"

    def _named_files(self, policy_key: str) -> set[str]:
        name = f"policies/{policy_key}/{MANIFEST}"
        try:
            policy = parse_manifest(self._root.read(name), policy_key)
        except FileNotFoundError:
            return set()
        return {name, *(policy.place_of(file) for file in policy.files)}


MOST_HELD = 2
"""Policies that stay in memory: the newest, and the one that an engine may be reading."""
SCRATCH_DIRECTORY = "policies/.scratch"
REMOVED = ".removed"
"""Directory of markers, by key, of policies whose weights were removed while the tables still speak of them."""


class Policies:
    """Publishes directories of weights and finds them again."""

    def __init__(self, root: Root, cache: Path | None = None) -> None:
        self._root = root
        # By user: a directory of another user's could not be written to.
        copies = cache or user_directory(tempfile.gettempdir(), "stagecoach-policies")
        self._scratches = (
            ScratchDirectories(copies / ".scratch", private=copies)
            if root.directory is None
            else ScratchDirectories(root.directory / SCRATCH_DIRECTORY)
        )
        self._remote = RemotePolicies(root, copies, self._scratches)
        self._in_memory: dict[Path, ScratchDirectories] = {}
        self._held: dict[str, tuple[Path, PolicyManifest]] = {}

    def scratch(self, name: str, memory: Path | None = None) -> Path:
        """A new empty local directory to write weights in; on a local root on its disk, so that publishing renames.

        What a process that died left in its own is never read, and removed when the next one is made. With `memory`
        the directory is below that one, which is in the machine's memory: see `hold`.
        """
        _check_key(name)
        if memory is not None:
            below = user_directory(memory)
            scratches = self._in_memory.setdefault(below, ScratchDirectories(below, private=below))
            with border("making a directory for weights", str(below)):
                return scratches.make(name)
        self._root.child(SCRATCH_DIRECTORY)  # what is left there is removed, which a link could make anything
        with border("making a directory for weights", str(self._scratches.directory)):
            return self._scratches.make(name)

    def hold(self, directory: Path, policy_key: str) -> PolicyManifest:
        """Hand a complete directory of weights out as the policy, to this process alone, until it is published.

        The newest `MOST_HELD` stay where they are also when they were published, for who reads them.
        """
        files = tuple(digest_files(directory))
        self._held[policy_key] = directory, PolicyManifest(policy_key, weights_digest(files), files, "")
        for old in list(self._held)[:-MOST_HELD]:
            if self._find_published(old):  # else the disk is slow, and what is held is all that there is
                self._let_go(old)
        return self._held[policy_key][1]

    def is_in_memory(self, directory: Path) -> bool:
        """Tell whether a directory out of `scratch` is in the machine's memory."""
        return directory.parent in self._in_memory

    def drop_held(self) -> None:
        """Remove all directories that are held: what is not published by now is lost."""
        for policy_key in list(self._held):
            self._let_go(policy_key)

    def _let_go(self, policy_key: str) -> None:
        directory, _ = self._held.pop(policy_key)
        self.discard(directory)

    def publish(self, directory: str | Path, policy_key: str) -> PolicyManifest:
        """Make a directory of weights a policy, complete or not at all, and return what it consists of.

        A directory out of `scratch` is moved; any other is copied. Publishing a key again with equal weights returns
        the policy that is there; with other weights, or with files that it lacks (an optimizer's), it raises
        PolicyConflict. Also raises NoSpace and StoreUnavailable.
        """
        _check_key(policy_key)
        source = Path(directory)
        with border(f"publishing policy {policy_key!r}", self._root.child(f"policies/{policy_key}")):
            files = tuple(digest_files(source))
            if not files:
                raise StoreError(f"{source} holds no files", "", "nothing was written", "write the weights first")
            weights = weights_digest(files)
            removed = self.removal_note(policy_key)
            if removed and removed["weights_sha256"] != weights:
                raise _conflict(policy_key, removed["weights_sha256"], weights)
            standing = self._find_published(policy_key)
            if standing is None:
                place = self._remote.put if self._root.directory is None else self._move
                place(source, policy_key, weights, files)
                standing = self._find_published(policy_key)
                assert standing is not None, "a policy just published is there"
            if standing.weights_sha256 != weights:
                raise _conflict(policy_key, standing.weights_sha256, weights)
            if missing := sorted({file.path for file in files} - {file.path for file in standing.files}):
                what = f"policy {policy_key!r} is there without {', '.join(missing)}"
                advice = "go on with the setting of training.save_optimizer_every with which it was published"
                raise PolicyConflict(what, standing.place, "the policy that is there was not touched", advice)
            # What was just uploaded is the local copy, where it may be moved and holds exactly the policy.
            is_scratch = self._root.directory is None and source.parent == self._scratches.directory
            if is_scratch and set(files) == set(standing.files):
                self._remote.adopt_copy(source, standing)
        self.discard(source)
        return standing

    def discard(self, directory: str | Path) -> None:
        """Remove a directory out of `scratch`; any other, one that is held, or one that is gone, is left alone."""
        if any(held == directory for held, _ in list(self._held.values())):
            return
        for scratches in (self._scratches, *self._in_memory.values()):
            scratches.discard(Path(directory))

    def find(self, policy_key: str) -> PolicyManifest | None:
        """The complete policy of a key, held or by its manifest; None where it is absent."""
        _check_key(policy_key)
        held = self._held.get(policy_key)
        return held[1] if held else self._find_published(policy_key)

    def _find_published(self, policy_key: str) -> PolicyManifest | None:
        try:
            with border(f"looking for policy {policy_key!r}", self._root.address):
                return parse_manifest(self._root.read(f"policies/{policy_key}/{MANIFEST}"), policy_key)
        except StoreUnavailable as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise

    def directory(self, policy_key: str, verify: bool = True) -> Path:
        """A local directory with the complete policy, verified: its own on a local root, else a download.

        Without `verify` only the sizes are checked: for who looks and loads nothing. Raises PolicyAbsent, DamagedSlice.
        """
        if held := self._held.get(policy_key):
            return held[0]
        policy = self.find(policy_key)
        if policy is None:
            raise self._absence(policy_key)
        local = self._remote.copy(policy) if self._root.directory is None else self._root.directory / policy.place
        check_files(local, policy.files, verify)
        return local

    def read_file(self, policy: PolicyManifest, file: File) -> bytes:
        """The verified bytes of one small file of a policy. Raises DamagedSlice; FileNotFoundError passes through."""
        if held := self._held.get(policy.policy_key):
            return (held[0] / file.path).read_bytes()
        data, place = self._root.read(policy.place_of(file)), self._root.child(policy.place_of(file))
        if sha256(data) != file.sha256:
            raise damaged_file(f"{place} is not the file that was written: its SHA-256 differs", place)
        return data

    def remove_unfinished(self, hours: float) -> int:
        """Delete what killed uploads left in an object store more than `hours` ago; return how many objects.

        On a local root there is nothing of the kind: what killed processes leave there is a scratch directory.
        """
        return self._remote.remove_unfinished(hours) if self._root.directory is None else 0

    def removal_note(self, policy_key: str) -> dict[str, str] | None:
        """What was noted when the weights of a key were removed (weights_sha256, at, why); None where they were not."""
        try:
            note: dict[str, str] = json.loads(self._root.read(f"policies/{REMOVED}/{policy_key}.json"))
        except FileNotFoundError:
            return None
        return note

    def remove(self, policy_key: str, why: str = "") -> None:
        """Remove a policy, complete or not there at all.

        With `why`, a note stays: errors about missing weights quote it, and weights made again under the same key are
        checked against it.
        """
        _check_key(policy_key)
        with suppress(DamagedSlice):  # of whose weights nothing is known that could be noted
            if why and (policy := self.find(policy_key)):
                note = {"weights_sha256": policy.weights_sha256, "at": datetime.now(UTC).isoformat(), "why": why}
                # The first note stands: what is removed twice was removed then.
                self._root.create(f"policies/{REMOVED}/{policy_key}.json", json.dumps(note).encode())
        place = f"policies/{policy_key}"
        with border(f"removing policy {policy_key!r}", self._root.child(place), "every other policy"):
            if self._root.directory is None:
                # Without its manifest there is no policy, however much of it is left.
                for path in (f"{place}/{MANIFEST}", *self._root.file_sizes(place)):
                    self._root.remove_unneeded(path)
            elif (self._root.directory / place).is_dir():
                # In one step: scratch directories go when a process dies.
                make_directory(Path(self._root.child(SCRATCH_DIRECTORY)))
                gone = f"{SCRATCH_DIRECTORY}/removed-{uuid4().hex}"
                os.rename(self._root.child(place), self._root.child(gone))
                synchronise(self._root.directory / "policies")
                self._root.remove_directory(gone)

    def adapter_bases(self, policy_keys: Iterable[str]) -> set[str]:
        """Return the keys of the policies below those that are adapters; removed weights are left out."""
        policies = [policy for key in policy_keys if (policy := self.find(key)) is not None]
        files = [(policy, file) for policy in policies for file in policy.files if file.path == BASE_FILE]
        return {str(json.loads(self.read_file(policy, file))["policy_key"]) for policy, file in files}

    def names(self) -> list[str]:
        """The keys of all complete policies."""
        with border("listing policies", self._root.address):
            return [name for name in self._root.names("policies") if not name.startswith(".") and self.find(name)]

    def _absence(self, policy_key: str) -> PolicyAbsent:
        marker = self.removal_note(policy_key)
        if marker is None:
            advice = "check the key; if its training finished, the directory was removed by hand: train that step again"
            return PolicyAbsent(f"there is no policy {policy_key!r}", self._root.address, "everything else", advice)
        what = f"the weights of policy {policy_key!r} were removed on {marker['at'][:10]} by {marker['why']}"
        advice = "take a version whose weights were kept, or train the recorded batches again from one before it"
        return PolicyAbsent(
            what, self._root.address, "the rows of that step in all tables, and every other policy", advice
        )

    def _move(self, source: Path, policy_key: str, weights_sha256: str, files: Sequence[File]) -> None:
        assert self._root.directory is not None
        target = self._root.directory / "policies" / policy_key
        ours = source
        if source.parent != self._scratches.directory:
            ours = self.scratch(policy_key)
            try:
                shutil.copytree(source, ours, dirs_exist_ok=True)
            except OSError:
                self.discard(ours)  # give the space back at once: the disk may be full
                raise
        (ours / MANIFEST).write_text(manifest_text(weights_sha256, files))
        # All of it is on the disk before the rename makes it a policy.
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


def _check_key(policy_key: str) -> None:
    if not policy_key.replace("-", "").replace("_", "").isalnum():
        raise StoreError(f"{policy_key!r} is no policy key", "", "nothing was touched", "use the key of finished work")


def _conflict(policy_key: str, recorded: str, weights_sha256: str) -> PolicyConflict:
    what = f"policy {policy_key!r} is there, or was, with weights {recorded}, not {weights_sha256}"
    advice = "the same key must give the same weights: look for what the key leaves out (device, library, thread count)"
    return PolicyConflict(what, f"policies/{policy_key}", "the policy that is there was not touched", advice)

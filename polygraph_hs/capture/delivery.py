"""Hand collected states from a worker to the driver process, without pickle and without a copy in between.

The worker assembles each group of states in an anonymous memory file. The driver opens it through ``/proc`` and maps
it: it has no name that could be guessed or left behind, only the same user can open it, and it is gone when both ends
are. Where that is not possible (no memory files, or another machine) the driver asks for the same bytes over RPC.

A page of fresh memory costs much more than a page that has been written before, so the worker keeps the files for
later parcels. The driver holds a shared lock on a file for as long as any tensor lies in it; the worker writes only
to a file that it can lock for itself alone.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import secrets
from dataclasses import dataclass, field

import torch

from polygraph_hs.capture.recorder import Collected

TOKEN_BYTES = 32
# The states begin here, behind the token.
OFFSET = 64
MIN_SEGMENT_BYTES = 2**16
# A file that this many parcels in a row had no use for is given back to the operating system.
MAX_IDLE_PARCELS = 8


def new_token() -> str:
    """A name for a parcel that nobody can guess."""
    return secrets.token_hex(TOKEN_BYTES // 2)


@dataclass
class Group:
    """Driver's side of a :class:`~polygraph_hs.capture.recorder.Collected`; ``values`` may map shared memory."""

    layers: tuple[int, ...]
    values: torch.Tensor
    sequences: list[int]
    row_start: list[int]


class Segment:
    """Memory of a worker that the driver can map.

    Attributes:
        size: in bytes, a power of two.
        fd: the memory file, or None where there are none.
        idle: how many parcels it has not been used for in a row.
    """

    def __init__(self, size: int):
        self.size = size
        self.idle = 0
        self.fd = os.memfd_create("polygraph_hs", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else None
        try:
            if self.fd is None:
                self.memory = bytearray(size)
            else:
                os.ftruncate(self.fd, size)
                self.memory = mmap.mmap(self.fd, size)
        except BaseException:
            self.close()
            raise

    def is_free(self) -> bool:
        """Whether no tensor of the driver lies in it any more."""
        if self.fd is None:
            return True
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Give up the worker's hold; a driver that has mapped the memory keeps it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.memory = None


@dataclass
class SegmentPool:
    """A worker's segments that no parcel holds; some may still be mapped by the driver."""

    idle: list[Segment] = field(default_factory=list)

    def take(self, size: int) -> Segment:
        """A segment of at least ``size`` bytes that nobody else reads."""
        size = max(MIN_SEGMENT_BYTES, 2 ** math.ceil(math.log2(size)))
        found = next((segment for segment in self.idle if segment.size == size and segment.is_free()), None)
        if found is None:
            return Segment(size)
        self.idle.remove(found)
        return found

    def give_back(self, segments: list[Segment]) -> None:
        """Keep the segments of a parcel for later ones, and close those that have not been used for long."""
        for segment in self.idle:
            segment.idle += 1
            if segment.idle > MAX_IDLE_PARCELS:
                segment.close()
        for segment in segments:
            segment.idle = 0
        self.idle = [*segments, *(segment for segment in self.idle if segment.memory is not None)]


class Parcel:
    """Worker's side: memory for groups of states, and what the driver needs to read them.

    Args:
        token: the driver's name for the parcel, from :func:`new_token`; it stands at the head of each group's memory.
        pool: where the memory comes from and goes back to.
    """

    def __init__(self, token: str, pool: SegmentPool):
        self.token = token
        self.pool = pool
        self.segments: list[Segment] = []
        self.groups: list[dict] = []

    def empty(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for the next group's values, to be filled and then described to :meth:`add`."""
        segment = self.pool.take(OFFSET + math.prod(shape) * dtype.itemsize)
        self.segments.append(segment)
        segment.memory[:TOKEN_BYTES] = self.token.encode()
        return _view(segment.memory, shape, dtype)

    def add(self, group: Collected) -> None:
        """Describe the next group, whose values lie in the memory that :meth:`empty` gave for it."""
        segment = self.segments[len(self.groups)]
        self.groups.append(
            {
                "fd": segment.fd,
                "size": segment.size,
                "layers": list(group.layers),
                "dtype": str(group.values.dtype).removeprefix("torch."),
                "shape": list(group.values.shape),
                "sequences": group.sequences,
                "row_start": group.row_start,
            }
        )

    def description(self) -> dict:
        """Plain numbers and strings, safe for any RPC."""
        return {"token": self.token, "pid": os.getpid(), "groups": self.groups}

    def contents(self, group: int, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` of a group's memory."""
        return bytes(self.segments[group].memory[start:stop])

    def close(self) -> None:
        """Give the memory back; a driver that has mapped some keeps it until its tensors are gone."""
        segments, self.segments = self.segments, []
        self.pool.give_back(segments)


def num_bytes(group: dict) -> int:
    """How many bytes of its memory a described group takes."""
    return OFFSET + math.prod(group["shape"]) * getattr(torch, group["dtype"]).itemsize


def open_group(description: dict, number: int) -> Group | None:
    """Map a group of a parcel. None if its memory cannot be reached from this process: then fetch its bytes instead."""
    group = description["groups"][number]
    if group["fd"] is None:
        return None
    try:
        fd = os.open(f"/proc/{description['pid']}/fd/{group['fd']}", os.O_RDWR)
    except OSError:
        return None
    try:
        # On another machine the same path may be some other file: the token tells.
        if os.fstat(fd).st_size != group["size"] or os.pread(fd, TOKEN_BYTES, 0) != description["token"].encode():
            return None
        # The lock is the open file's; the mapping keeps that open until the last tensor on it is gone.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        memory = mmap.mmap(fd, num_bytes(group))
    finally:
        os.close(fd)
    return read_group(memory, description, number)


def read_group(memory: mmap.mmap | bytearray, description: dict, number: int) -> Group:
    """A group of a parcel, as tensors on ``memory``, which they keep alive."""
    group = description["groups"][number]
    if len(memory) != num_bytes(group):
        raise ValueError(
            f"the captured states' memory has {len(memory)} bytes where {num_bytes(group)} were announced for it"
        )
    if bytes(memory[:TOKEN_BYTES]) != description["token"].encode():
        raise ValueError("the captured states' memory does not carry the token that was announced for it")
    values = _view(memory, group["shape"], getattr(torch, group["dtype"]))
    return Group(tuple(group["layers"]), values, group["sequences"], group["row_start"])


def _view(memory: mmap.mmap | bytearray, shape: tuple[int, int, int] | list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=OFFSET).view(tuple(shape))

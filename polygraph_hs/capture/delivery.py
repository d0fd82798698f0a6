"""Hand collected states from a worker to the driver process, without pickle.

The bytes lie in one anonymous memory file of the worker. The driver opens it through ``/proc`` and maps it: it has
no name that could be guessed or left behind, only the same user can open it, and it is gone when both ends are.
Where that is not possible (no memory files, or another machine) the driver asks for the same bytes over RPC.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass

import torch

from polygraph_hs.capture.recorder import Collected

TOKEN_BYTES = 32
ALIGNMENT = 64


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


class Parcel:
    """Worker's side: the bytes of some collected states, and what the driver needs to read them.

    Args:
        collected: the states.
        token: the driver's name for the parcel, from :func:`new_token`; it stands at the head of the bytes.
    """

    def __init__(self, collected: list[Collected], token: str):
        self.token = token.encode()
        self.groups = []
        offset = ALIGNMENT
        for part in collected:
            self.groups.append(
                {
                    "layers": list(part.layers),
                    "dtype": str(part.values.dtype).removeprefix("torch."),
                    "shape": list(part.values.shape),
                    "offset": offset,
                    "sequences": part.sequences,
                    "row_start": part.row_start,
                }
            )
            offset += -(-part.values.nbytes // ALIGNMENT) * ALIGNMENT
        self.size = offset
        self.fd = os.memfd_create("polygraph_hs", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else None
        try:
            if self.fd is None:
                self.memory = bytearray(self.size)
            else:
                os.ftruncate(self.fd, self.size)
                self.memory = mmap.mmap(self.fd, self.size)
            self.memory[:TOKEN_BYTES] = self.token
            for part, values in zip(collected, _views(self.memory, self.groups), strict=True):
                values.copy_(part.values)
        except BaseException:
            self.close()
            raise

    def description(self) -> dict:
        """Plain numbers and strings, safe for any RPC."""
        return {
            "token": self.token.decode(),
            "pid": os.getpid(),
            "fd": self.fd,
            "size": self.size,
            "groups": self.groups,
        }

    def contents(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` of the parcel."""
        return bytes(self.memory[start:stop])

    def close(self) -> None:
        """Give up the worker's hold; a driver that has mapped the memory keeps it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.memory = None


def open_parcel(description: dict) -> list[Group] | None:
    """Map a parcel. None if its memory cannot be reached from this process: then fetch its contents instead."""
    if description["fd"] is None:
        return None
    try:
        fd = os.open(f"/proc/{description['pid']}/fd/{description['fd']}", os.O_RDWR)
    except OSError:
        return None
    try:
        # On another machine the same path may be some other file: the token tells.
        if os.fstat(fd).st_size != description["size"]:
            return None
        if os.pread(fd, TOKEN_BYTES, 0) != description["token"].encode():
            return None
        memory = mmap.mmap(fd, description["size"])
    finally:
        os.close(fd)
    return read_groups(memory, description)


def read_groups(memory: mmap.mmap | bytearray, description: dict) -> list[Group]:
    """The groups of a parcel, as tensors on ``memory``, which they keep alive."""
    if len(memory) != description["size"]:
        raise ValueError(
            f"the captured states' memory has {len(memory)} bytes where {description['size']} were announced for it"
        )
    if bytes(memory[:TOKEN_BYTES]) != description["token"].encode():
        raise ValueError("the captured states' memory does not carry the token that was announced for it")
    return [
        Group(tuple(group["layers"]), values, group["sequences"], group["row_start"])
        for group, values in zip(description["groups"], _views(memory, description["groups"]), strict=True)
    ]


def _views(memory: mmap.mmap | bytearray, groups: list[dict]) -> list[torch.Tensor]:
    views = []
    for group in groups:
        layers, rows, hidden_size = group["shape"]
        dtype = getattr(torch, group["dtype"])
        count = layers * rows * hidden_size
        views.append(torch.frombuffer(memory, dtype=dtype, count=count, offset=group["offset"]).view(group["shape"]))
    return views

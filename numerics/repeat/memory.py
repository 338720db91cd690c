"""Follow the memory of tensors while a step runs: who wrote it last, what overlaps, what nobody has written."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from numerics.describe import NoValuesError, parts_of
from numerics.repeat.trace import Overlap

MOST_OVERLAPS = 20  # that are listed
BEFORE = -1  # writer of memory that exists before the step


@dataclass
class StorageBlock:
    """The memory of one storage. written: number of writes. writer: the last operation. name: who allocated it.

    unset: whether torch.empty or a relative of it allocated it, so that elements may never have been written.
    known: digest of each view that was read or written, with `written` at that time.
    """

    reference: StorageWeakRef
    address: int
    size: int
    device: str
    name: str
    writer: int = BEFORE
    written: int = 0
    unset: bool = False
    known: dict[Any, tuple[int, int, int]] = field(default_factory=dict)


class MemoryMap:
    """The storages that operations used.

    A weak reference keeps torch from using the identity of a freed storage for another one, and shows whether it lives.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, StorageBlock] = {}
        self.overlaps: list[Overlap] = []
        self._live: dict[str, list[tuple[int, int]]] = {}  # device -> sorted (address, identity)
        self._largest: dict[str, int] = {}

    def block(self, tensor: Tensor, name: str) -> StorageBlock | None:
        """Return the block of a tensor, a new one on first use; None for tensors without memory."""
        try:
            storage = with_memory(tensor).untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (NoValuesError, RuntimeError, NotImplementedError):
            return None
        if not address or not size:
            return None
        reference = StorageWeakRef(storage)
        found = self.blocks.get(reference.cdata)
        if found is None:
            found = self.blocks[reference.cdata] = StorageBlock(
                reference, address, size, str(tensor.device), name
            )
            self._insert(found)
        elif (found.address, found.size) != (address, size):  # resized
            self._remove(found)
            found.address, found.size = address, size
            found.known.clear()
            self._insert(found)
        return found

    def write(self, block: StorageBlock, event: int) -> None:
        block.written += 1
        block.writer = event

    def expect(self, block: StorageBlock, tensor: Tensor, digest: int, event: int) -> tuple[int, int] | None:
        """Note the digest number of a view. Return (digest number, event) of an earlier one that must be equal.

        None for a tensor that consists of several, as a sparse one.
        """
        if with_memory(tensor) is not tensor:
            return None
        key = (tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        if not tensor.is_contiguous():
            key += (tuple(tensor.shape), tensor.stride())  # type: ignore[assignment]
        before = block.known.get(key)
        if before is not None and before[0] == block.written:
            return before[1], before[2]
        block.known[key] = (block.written, digest, event)
        return None

    # -- overlaps

    def _insert(self, block: StorageBlock) -> None:
        live = self._live.setdefault(block.device, [])
        end = block.address + block.size
        reach = self._largest.get(block.device, 0)
        first = bisect.bisect_left(live, (block.address - reach, 0))
        stale = []
        for address, identity in live[first : bisect.bisect_left(live, (end, 0))]:
            other = self.blocks[identity]
            if other.reference.expired():
                stale.append((address, identity))
            elif other.address + other.size > block.address and len(self.overlaps) < MOST_OVERLAPS:
                shared = min(end, other.address + other.size) - max(block.address, other.address)
                self.overlaps.append(Overlap(_text(other), _text(block), shared))
        for entry in stale:
            live.remove(entry)
            del self.blocks[entry[1]]
        bisect.insort(live, (block.address, block.reference.cdata))
        self._largest[block.device] = max(reach, block.size)

    def _remove(self, block: StorageBlock) -> None:
        entry = (block.address, block.reference.cdata)
        live = self._live.get(block.device, [])
        if entry in live:
            live.remove(entry)


def with_memory(tensor: Tensor) -> Tensor:
    """Return the tensor that has the memory: the values of a sparse or nested tensor, else the tensor itself.

    NoValuesError where there is none.
    """
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    return parts_of(tensor)[0]


def _text(block: StorageBlock) -> str:
    return f"{block.name} at {block.address:#x}, {block.size} bytes"

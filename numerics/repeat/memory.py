"""Follow the memory of tensors while a step runs: who wrote it last, what overlaps, what nobody has written."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from numerics.describe import NoValuesError, parts_of
from numerics.repeat.trace import BEFORE

MOST_OVERLAPS = 20  # that are listed


@dataclass
class StorageBlock:
    """The memory of one storage."""

    reference: StorageWeakRef
    address: int
    size: int
    name: str  # of the operation that returned it first
    writer: int = BEFORE  # the last operation that wrote it
    written: int = 0  # number of writes
    unset: bool = False  # of torch.empty or a relative, so that elements may never have been written
    known: dict[Any, tuple[int, int]] = field(default_factory=dict)  # view -> `written` then, its digest

    def __str__(self) -> str:
        return f"{self.name} at {self.address:#x}, {self.size} bytes"


class MemoryMap:
    """The storages that operations used.

    A weak reference keeps torch from using the identity of a freed storage for another one, and shows whether it lives.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, StorageBlock] = {}
        self.overlaps: list[str] = []
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
        reference, device = StorageWeakRef(storage), str(tensor.device)
        found = self.blocks.get(reference.cdata)
        if found is None:
            found = self.blocks[reference.cdata] = StorageBlock(reference, address, size, name)
            self._insert(found, device)
        elif (found.address, found.size) != (address, size):  # resized
            live, entry = self._live.get(device, []), (found.address, reference.cdata)
            if entry in live:
                live.remove(entry)
            found.address, found.size = address, size
            found.known.clear()
            self._insert(found, device)
        return found

    def expect(self, block: StorageBlock, tensor: Tensor, digest: int) -> int | None:
        """Note the place of a view's digest. Return that of an earlier one that must be equal.

        None for the first of a view, and for a tensor that consists of several, as a sparse one.
        """
        if with_memory(tensor) is not tensor:
            return None
        form = tensor.numel() if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        key = (form, tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        before = block.known.get(key)
        if before is not None and before[0] == block.written:
            return before[1]
        block.known[key] = (block.written, digest)
        return None

    def _insert(self, block: StorageBlock, device: str) -> None:
        """Add a block to the live ones of its device, and list those that share bytes with it."""
        live, reach = self._live.setdefault(device, []), self._largest.get(device, 0)
        end = block.address + block.size
        first = bisect.bisect_left(live, (block.address - reach, 0))
        for entry in live[first : bisect.bisect_left(live, (end, 0))]:
            other = self.blocks[entry[1]]
            shared = min(end, other.address + other.size) - max(block.address, other.address)
            if other.reference.expired():
                live.remove(entry)
                del self.blocks[entry[1]]
            elif shared > 0 and len(self.overlaps) < MOST_OVERLAPS:
                self.overlaps.append(f"{other} and {block} share {shared} bytes")
        bisect.insort(live, (block.address, block.reference.cdata))
        self._largest[device] = max(reach, block.size)


def with_memory(tensor: Tensor) -> Tensor:
    """Return the tensor that has the memory: the values of a sparse or nested tensor, else the tensor itself.

    NoValuesError where there is none.
    """
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    return parts_of(tensor)[0]

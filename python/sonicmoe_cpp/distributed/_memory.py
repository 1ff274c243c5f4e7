"""Allocates device memory that the other ranks of a group can write, and maps the memory of the
other ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

ALIGNMENT = 256  # bytes; exchange.h requires it of a buffer
_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Keeps torch from setting up NVLink multicast, which the exchange does not use."""
    before = os.environ.get(_MULTICAST)
    os.environ[_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST]
        else:
            os.environ[_MULTICAST] = before


class SymmetricMemory:
    """Maps memory by torch's symmetric memory, a private module in torch 2.10 to 2.13."""

    name = "torch symmetric memory"

    @staticmethod
    def is_available() -> bool:
        try:
            import torch.distributed._symmetric_memory as symmetric
        except ImportError:
            return False
        return hasattr(symmetric, "rendezvous") and hasattr(symmetric, "_SymmetricMemory")

    @staticmethod
    def allocate(size: int, device: torch.device) -> Tensor:
        from torch.distributed._symmetric_memory import _SymmetricMemory

        # symmetric.empty() may place the tensor inside a larger block of a memory pool.
        return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)

    @staticmethod
    def addresses(memory: Tensor, group: dist.ProcessGroup) -> tuple[list[int], object]:
        """The addresses at which this process sees every rank's memory, and an object that keeps
        the mapping alive."""
        import torch.distributed._symmetric_memory as symmetric

        with _without_multicast():
            if TorchVersion(torch.__version__) < "2.11":
                symmetric.enable_symm_mem_for_group(group.group_name)
            handle = symmetric.rendezvous(memory, group.group_name)
        offset = getattr(handle, "offset", 0)
        return [address + offset for address in handle.buffer_ptrs], handle


class CudaIpc:
    """Allocates by torch's allocator and maps by CUDA IPC, as torch.multiprocessing does."""

    name = "CUDA IPC"

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def allocate(size: int, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    @staticmethod
    def addresses(memory: Tensor, group: dist.ProcessGroup) -> tuple[list[int], object]:
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild = mine = problem = None
        try:
            rebuild, mine = reduce_tensor(memory)
        except RuntimeError as error:  # raised below: the other ranks wait for this rank's data
            problem = error
        of_ranks: list = [None] * group.size()
        dist.all_gather_object(of_ranks, mine, group)
        if problem is not None:
            raise problem
        if None in of_ranks:
            raise RuntimeError(f"rank {of_ranks.index(None)} of the group cannot share its memory")
        mapped = []
        for rank, arguments in enumerate(of_ranks):
            if rank == group.rank():
                mapped.append(memory)
                continue
            arguments = list(arguments)
            # The handle is opened on this rank's GPU, which can then access the memory. The device
            # index in `arguments` is valid only in the process that sent the handle.
            arguments[_STORAGE_DEVICE] = memory.device.index
            mapped.append(rebuild(*arguments))
        return [t.data_ptr() for t in mapped], mapped


# Position of the argument storage_device of torch.multiprocessing.reductions.rebuild_cuda_tensor.
_STORAGE_DEVICE = 6
WAYS = (SymmetricMemory, CudaIpc)


def aligned(addresses: list[int], own: int) -> list[int]:
    """The first address in each buffer that is a multiple of ALIGNMENT. `own` is the address of
    this rank's buffer."""
    if own not in addresses:
        raise RuntimeError(f"the buffer of this rank begins at {own}, but is mapped elsewhere")
    if len({address % ALIGNMENT for address in addresses}) != 1 or 0 in addresses:
        raise RuntimeError("the ranks' buffers are not mapped at equal offsets")
    return [address + -address % ALIGNMENT for address in addresses]


def number_of(text: str) -> int:
    """A 62-bit hash of a text, as a number that Group.read_all() can send."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2


def host_number() -> int:
    """A number that is the same in all processes of this machine and differs between machines."""
    try:
        return number_of(Path("/proc/sys/kernel/random/boot_id").read_text())
    except OSError:
        return number_of(os.uname().nodename)


def gpu_number(index: int) -> int:
    return number_of(str(torch.cuda.get_device_properties(index).uuid))


def reaches(device: torch.device, numbers: list[int]) -> bool:
    """Whether `device` can access the GPUs with these gpu_number()s. A GPU that is not visible in
    this process counts as accessible: if it is not, mapping its memory fails later."""
    own = gpu_number(device.index)
    visible = {gpu_number(i): i for i in range(torch.cuda.device_count())}
    others = [visible[number] for number in numbers if number != own and number in visible]
    return all(torch.cuda.can_device_access_peer(device.index, other) for other in others)

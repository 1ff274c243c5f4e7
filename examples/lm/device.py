"""The device that the demo trains on, its precision, memory and threads, and a GPU's defaults."""

import os
import threading
from dataclasses import dataclass, field

import sonicmoe_cpp
import torch

from lm.errors import UserError

# The defaults that --device cuda changes: a larger model on more tokens a step. An expert gets 2048
# rows on average, rounded to the 128 rows of a tile.
LARGER = {
    "context": 512,
    "batch": 32,
    "width": 768,
    "layers": 8,
    "heads": 12,
    "expert_width": 128,
    "tile": 128,
    "steps": 400,
    "lr": 1e-3,
}


@dataclass(frozen=True)
class Device:
    """A device with the precision of its matrices and the settings it changes."""

    name: str
    precision: str
    settings: dict = field(default_factory=dict)


CPU = Device("cpu", "fp32")
CUDA = Device("cuda", "bf16", LARGER)


def choose(asked: str) -> Device:
    """The requested device. Without a request, the GPU if sonicmoe_cpp can compute on it, else the
    CPU."""
    if asked not in ("", "cpu", "cuda"):
        raise UserError(f"device is '{asked}'; it must be cpu or cuda")
    reason = sonicmoe_cpp.unsupported_reason("cuda")
    if asked == "cuda" and reason is not None:
        raise UserError(f"device cuda cannot be used: {reason}")
    return CUDA if asked != "cpu" and reason is None else CPU


def memory_bytes(name: str) -> int:
    """The total memory of a device."""
    if name == "cuda":
        return torch.cuda.get_device_properties("cuda").total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def most_threads() -> int:
    """The number of CPU threads above which further threads only wait for each other."""
    return 4 * len(os.sched_getaffinity(0))


def startable_threads(wanted: int) -> int:
    """How many of `wanted` CPU threads the system allows this process, with the calling thread.

    libgomp ends the process if it cannot start a thread that torch asks for.
    """
    done = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(wanted - 1):
            thread = threading.Thread(target=done.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:  # a limit on the user's or the container's processes
        print(f"only {len(started) + 1} of {wanted} threads can be started")
    done.set()
    for thread in started:
        thread.join()
    return len(started) + 1


def autocast(device: str, precision: str) -> torch.autocast:
    """The precision in which matrices are multiplied; weights and their gradients stay fp32."""
    return torch.autocast(device, torch.bfloat16, enabled=precision != "fp32")

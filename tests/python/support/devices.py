"""The devices that a test runs on: the CPU, and CUDA if this build and machine have it."""

import pytest
import sonicmoe_cpp
import torch
from torch.utils._python_dispatch import TorchDispatchMode


def _param(device: str):
    reason = sonicmoe_cpp.unsupported_reason(device)
    skip = [pytest.mark.skip(reason=reason)] if reason else []
    return pytest.param(device, marks=skip)


DEVICES = [_param("cpu"), _param("cuda")]
# Both devices are tested in bf16, only the CPU in fp32.
DTYPES = [
    pytest.param(device.values[0], dtype, marks=device.marks, id=f"{device.values[0]}-{name}")
    for device in DEVICES
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    if (device.values[0], name) != ("cuda", "fp32")
]


class Waits(TorchDispatchMode):
    """Records calls of operators that would make the host wait for a GPU; works on any device."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "repeat_interleave", "unique")

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        masks = name.startswith("aten::index") and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in (args[1] if isinstance(args[1], (list, tuple)) else ())
        )
        if masks or name.removeprefix("aten::").startswith(self.NAMES):
            self.calls.append(name)
        return function(*args, **(kwargs or {}))

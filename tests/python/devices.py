"""The devices that a test runs on: the CPU, and CUDA where this build and machine have it."""

import pytest
import sonicmoe_cpp
import torch


def _param(device: str):
    reason = sonicmoe_cpp.unsupported_reason(device)
    skip = [pytest.mark.skip(reason=reason)] if reason else []
    return pytest.param(device, marks=skip)


DEVICES = [_param("cpu"), _param("cuda")]
# The rule for rounded dtypes holds on both; fp32 is the CPU's.
DTYPES = [
    pytest.param(device.values[0], dtype, marks=device.marks, id=f"{device.values[0]}-{name}")
    for device in DEVICES
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    if (device.values[0], name) != ("cuda", "fp32")
]

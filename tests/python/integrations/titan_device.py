"""The CPU as torchtitan's accelerator. Import this module before torchtitan.

torchtitan runs on accelerators only. This module answers the calls that torchtitan would make to
torch.cuda; torchtitan itself stays as it is.
"""

import types

import torch
import torch._utils
import torch.distributed as dist


def cpu_device() -> types.ModuleType:
    module = types.ModuleType("cpu_device")
    module.__dict__.update(torch.cpu.__dict__)
    properties = types.SimpleNamespace(total_memory=1 << 34)
    module.__dict__.update(
        set_device=lambda device: None,
        current_device=lambda: 0,
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: properties,
        reset_peak_memory_stats=lambda *device: None,
        empty_cache=lambda: None,
        memory_stats=lambda *device: {},
    )
    return module


device = cpu_device()
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: device
if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 needs a torch later than 2.13 for it
    dist.set_timeout = lambda *arguments: None

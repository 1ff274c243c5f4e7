"""A weight as quantisation packages keep it, such as torchao's Int8Tensor."""

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing


class CodedTensor(torch.Tensor):
    """int8 codes of a bf16 tensor; knows few operators."""

    @staticmethod
    def __new__(cls, codes):
        facts = {"dtype": torch.bfloat16, "device": codes.device, "requires_grad": False}
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, **facts)

    def __init__(self, codes):
        self.codes = codes

    def __tensor_flatten__(self):
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(tensors, _, size, stride):
        return CodedTensor(tensors["codes"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            out = CodedTensor(function(args[0].codes, *args[1:]))
            return return_and_correct_aliasing(function, args, kwargs or {}, out)
        raise NotImplementedError(f"CodedTensor has no {function}")

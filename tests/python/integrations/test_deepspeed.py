"""MoE under DeepSpeed's zero.Init, which partitions every module's parameters at the end of its
constructor. A stand-in has the parts of DeepSpeed that the package uses."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import sonicmoe_cpp
import torch
from sonicmoe_cpp.module import Router

E, K, D, N = 4, 2, 16, 8


def partition(parameter):
    parameter.ds_id, parameter.whole = 0, parameter.data
    parameter.data = parameter.data.new_empty(0)


@contextlib.contextmanager
def gathered(parameters, modifier_rank=None):
    for parameter in parameters:
        parameter.data = parameter.whole.clone()
    yield
    for parameter in parameters:
        if modifier_rank is not None:
            parameter.whole = parameter.data
        parameter.data = parameter.data.new_empty(0)


@pytest.fixture
def deepspeed(monkeypatch):
    zero = SimpleNamespace(GatheredParameters=gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))


def make():
    torch.manual_seed(0)
    return sonicmoe_cpp.MoE(E, K, D, N, bias=True, shared_experts=1)


def test_the_router_is_partitioned_before_the_layer_is_initialised(deepspeed, monkeypatch):
    want = make()
    construct = Router.__init__

    def init(self, *arguments, **options):
        construct(self, *arguments, **options)
        partition(self.weight)

    monkeypatch.setattr(Router, "__init__", init)
    layer = make()
    assert torch.equal(layer.router.weight.whole, want.router.weight)
    assert torch.equal(layer.w_up, want.w_up) and torch.equal(layer.w_down, want.w_down)


def test_a_partitioned_layer(deepspeed):
    want, layer = make(), make()
    for parameter in layer.parameters():
        partition(parameter)
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    want.reset_parameters()
    for (name, got), expected in zip(layer.named_parameters(), want.parameters(), strict=True):
        assert got.numel() == 0 and torch.equal(got.whole, expected), name
    layer.add_lora(2, 4.0)
    want.add_lora(2, 4.0)
    assert layer.lora.up_a.shape == want.lora.up_a.shape == (E, 2, D)
    assert not layer.w_up.requires_grad and layer.w_up.numel() == 0
    for parameter in layer.lora.parameters():
        partition(parameter)
    assert repr(layer) == repr(want)  # DeepSpeed prints the model


class Gathering(dict):
    """ZeRO-3's replacement of _parameters: during the engine's forward a read gathers."""

    def __getitem__(self, name):
        parameter = super().__getitem__(name)
        if parameter is not None and parameter.numel() == 0:
            parameter.data = parameter.whole.clone()
        return parameter


def test_factors_are_read_after_their_module_was_partitioned_again(deepspeed):
    want, layer = make(), make()
    for moe in (want, layer):
        torch.manual_seed(3)
        moe.add_lora(2, 4.0)
        torch.nn.init.normal_(moe.lora.up_b)
        torch.nn.init.normal_(moe.lora.down_b)
    for parameter in layer.lora.parameters():
        partition(parameter)

    def after(module, inputs, output):
        for parameter in module.parameters():
            parameter.data = parameter.data.new_empty(0)

    layer.lora._parameters = Gathering(layer.lora._parameters)
    layer.lora.register_forward_hook(after)
    x = torch.randn(5, D, requires_grad=True)
    results = []
    for moe in (layer, want):
        out = moe(x)[0]
        factors = list(moe.lora.parameters())
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *factors])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

"""precision="fp8" through transformers and torchtitan, against the functions."""

import warnings

import pytest
import sonicmoe_cpp
import torch

BF16 = torch.bfloat16


def chosen(tokens, experts, k=2):
    g = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(tokens)])
    return ids, torch.rand(tokens, k, generator=g)


# ---- transformers --------------------------------------------------------------------------------


@pytest.fixture
def model():
    pytest.importorskip("transformers", reason="transformers is not installed")
    import hf_models
    from sonicmoe_cpp.integrations import hf

    hf.register()
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256}
    return hf_models.build("qwen3_moe", **sizes).to(BF16)


def test_transformers(model):
    from sonicmoe_cpp.integrations import hf

    experts = next(m for m in model.modules() if hasattr(m, "is_transposed"))
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)).to(BF16)
    ids, weights = chosen(40, 6)
    arguments = (x, ids, weights, experts.gate_up_proj, experts.down_proj)
    plain = experts(x, ids, weights)
    for options in ({"precision": "fp8"}, {"precision": "fp8", "keep_h": "bf16"}):
        hf.set_precision(model, *options.values())
        want = sonicmoe_cpp.moe(*arguments, **options)
        out = experts(x, ids, weights)
        assert torch.equal(out, want) and not torch.equal(out, plain)
        parameters = [experts.gate_up_proj, experts.down_proj]
        for got, own in zip(
            torch.autograd.grad(out.float().square().sum(), parameters),
            torch.autograd.grad(want.float().square().sum(), parameters),
            strict=True,
        ):
            assert torch.equal(got, own)
    with torch.no_grad():
        experts.down_proj.mul_(2)  # the copy of the weights is made anew
    assert torch.equal(experts(x, ids, weights), sonicmoe_cpp.moe(*arguments, precision="fp8"))
    for precision in ("auto", None):
        hf.set_precision(model, precision)
        assert torch.equal(experts(x, ids, weights), sonicmoe_cpp.moe(*arguments))


def test_transformers_model_generates_and_trains(model):
    from sonicmoe_cpp.integrations import hf

    hf.set_precision(model, "fp8")
    ids = torch.randint(96, (2, 9), generator=torch.Generator().manual_seed(2))
    longer = model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False)
    with torch.no_grad():
        assert torch.equal(longer[:, -1], model(longer[:, :-1]).logits[:, -1].argmax(-1))
    assert longer.shape == (2, 12) and torch.equal(longer[:, :9], ids)
    out = model(ids, labels=ids)
    out.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma4", "nemotron_h"])
def test_transformers_experts_with_last_blocks_of_64(architecture, monkeypatch):
    """Small sizes as odd as those of gpt-oss (2880), Gemma 4 (704) and Nemotron Nano (1856)."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    import hf_architectures
    from sonicmoe_cpp.integrations import hf
    from sonicmoe_cpp.integrations._hf_experts import weights_of

    hf.register()
    sizes = {name: 192 if "hidden" in name else 64 for name in hf_architectures.SMALL}
    sizes = {n: v for n, v in sizes.items() if n.endswith("size")}
    monkeypatch.setattr(hf_architectures, "SMALL", hf_architectures.SMALL | sizes)
    ((kind, module),) = hf_architectures.classes(architecture)
    experts = hf_architectures.build(kind, module).to(BF16)
    experts.config._experts_implementation = "sonicmoe_cpp"
    assert set(experts.down_proj.shape[1:]) == {64, 192}
    ids, weights = chosen(40, experts.down_proj.shape[0])
    x = torch.randn(40, weights_of(experts)[0].shape[2]).to(BF16)

    def step(precision):
        hf.set_precision(experts, precision)
        out = experts(x, ids, weights)
        return [out, *torch.autograd.grad(out.float().square().sum(), [*experts.parameters()])]

    plain = step(None)
    for plain_one, coded in zip(plain, step("fp8"), strict=True):
        angle = torch.cosine_similarity(plain_one.double().flatten(), coded.double().flatten(), 0)
        assert 0.99 < angle < 0.99999
    assert len(plain) > 2


def test_transformers_says_where_a_precision_has_no_effect(model):
    from sonicmoe_cpp.integrations import hf

    dense = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match='precision is "fp8", but Sequential has no experts'):
        hf.set_precision(dense, "fp8")
    hf.set_precision(dense, None)
    model.set_experts_implementation("eager")
    with pytest.warns(UserWarning, match='precision "fp8" has no effect on .*experts until'):
        hf.set_precision(model, "fp8")
    model.set_experts_implementation("sonicmoe_cpp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.set_precision(model, "fp8")


def test_transformers_refuses_an_unknown_precision(model):
    from sonicmoe_cpp.integrations import hf

    with pytest.raises(ValueError, match="precision is 'fp4'"):
        hf.set_precision(model, "fp4")


# ---- torchtitan ----------------------------------------------------------------------------------

E, K, D, N = 4, 2, 128, 256


@pytest.fixture
def titan():
    """(overrides, GroupedExperts)."""
    pytest.importorskip("torchtitan.models.common.moe", reason="needs torchtitan 0.3")
    from sonicmoe_cpp.integrations.torchtitan import overrides
    from torchtitan.models.common.moe import GroupedExperts

    return overrides, GroupedExperts


def built(config):
    torch.manual_seed(0)
    module = config.build()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return module.to(BF16)


@pytest.mark.parametrize("precision", [None, "fp8"])
def test_torchtitan(titan, precision):
    overrides, kind = titan
    config = kind.Config(dim=D, hidden_dim=N, num_experts=E)
    experts = built(overrides.grouped_experts(config, precision))
    rows = torch.randn(50, D, generator=torch.Generator().manual_seed(1)).to(BF16)
    counts = torch.tensor([20, 0, 17, 13])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    weights = ((experts.w1_EFD, experts.w3_EFD), experts.w2_EDF)
    want = sonicmoe_cpp.moe_grouped(rows, offsets, *weights, precision=precision)
    assert torch.equal(experts(rows, counts), want)


def test_torchtitan_passes_the_precision_on(titan):
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    overrides, kind = titan
    config = RoutedExperts.Config(
        inner_experts=kind.Config(dim=D, hidden_dim=N, num_experts=E),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
    )
    assert overrides.routed_experts(config).inner_experts.precision is None
    assert overrides.routed_experts(config, "auto").inner_experts.precision == "auto"
    with pytest.raises(ValueError, match="precision is 'fp4'"):
        overrides.routed_experts(config, "fp4")

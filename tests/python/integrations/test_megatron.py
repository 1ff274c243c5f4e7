"""Megatron-Core's MoE layer with experts of this library, against its own experts."""

import contextlib
import importlib
import sys

import pytest
import sonicmoe_cpp
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from reference import error
from sonicmoe_cpp import Activation
from worlds import free_port, leave

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
import megatron_support as support
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from sonicmoe_cpp.integrations import megatron

TOKENS = (12, 2)  # sequence, batch
LINEARS = ("linear_fc1", "linear_fc2")


@pytest.fixture
def one_rank():
    with support.parallel(dist.HashStore()):
        yield


def of_experts(experts, what=lambda parameter: parameter.detach()):
    """The weights of either kind of experts, or their gradients, as [(E, G*n, d), (E, d, n)]."""
    if isinstance(experts, megatron.SonicMoECppExperts):
        return experts._by_expert(what(experts.weight1), what(experts.weight2))
    linears = ([getattr(e, name) for e in experts.local_experts] for name in LINEARS)
    return [torch.stack([what(linear.weight) for linear in each]) for each in linears]


def pair(config, spec=None):
    """(ours, theirs): two layers with equal parameters."""
    spec = spec or support.own_spec()
    theirs = support.layer_of(spec, config)
    ours = support.layer_of(megatron.with_experts(spec), config)
    assert isinstance(ours.experts, megatron.SonicMoECppExperts)
    ours.router.load_state_dict(theirs.router.state_dict())
    if theirs.shared_experts is not None:
        ours.shared_experts.load_state_dict(theirs.shared_experts.state_dict())
    for mine, other in zip(of_experts(ours.experts), of_experts(theirs.experts), strict=True):
        mine.copy_(other)
    return ours, theirs


def train(layer, steps=6):
    """Losses, and the gradient of the input, of a few steps of Adam."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(*TOKENS, support.D, generator=g).requires_grad_()
    target = torch.randn(*TOKENS, support.D, generator=g)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x)[0], target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), x.grad


OAI = {"activation_func": quick_gelu, "activation_func_clamp_value": 1.0, "glu_linear_offset": 1.0}
CONFIGS = {
    "swiglu": {},
    "all to all": {"moe_token_dispatcher_type": "alltoall"},
    "shared experts": {"moe_shared_expert_intermediate_size": support.N},
    "geglu": {"activation_func": F.gelu},
    "gpt-oss": OAI,
    "no gate": {"gated_linear_unit": False, "activation_func": squared_relu},
    "DeepSeek-V3": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_dtype": "fp32",
    },
    "scores on the input": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_apply_probs_on_input": True,
    },
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_training_is_that_of_megatrons_own_experts(one_rank, options):
    ours, theirs = pair(support.config_of(**options))
    (losses, dx), (wanted, wanted_dx) = train(ours), train(theirs)
    assert wanted[-1] < 0.9 * wanted[0]
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    assert error(dx, wanted_dx) < 1e-3
    for weight, want in zip(of_experts(ours.experts), of_experts(theirs.experts), strict=True):
        assert error(weight, want) < 1e-3


def test_the_activation_is_recognised(one_rank):
    for options, want in (
        ({}, Activation("swiglu")),
        (OAI, Activation("swiglu_oai", alpha=1.702, limit=1.0)),
        ({"activation_func_clamp_value": 7.0}, Activation("swiglu_clamped", limit=7.0)),
        (CONFIGS["no gate"], Activation("relu2")),
    ):
        spec = megatron.with_experts(support.own_spec())
        assert support.layer_of(spec, support.config_of(**options)).experts.activation == want


def main_gradients(fused, overlap, dtype=torch.bfloat16, **options):
    """main_grad of router and experts after two micro-batches under Megatron's DDP."""
    config = support.config_of(
        gradient_accumulation_fusion=fused, params_dtype=dtype, bf16=dtype == torch.bfloat16
    )
    layer = support.layer_of(megatron.with_experts(support.own_spec()), config)
    buffers = DistributedDataParallelConfig(
        **({"grad_reduce_in_fp32": True, "overlap_grad_reduce": overlap} | options)
    )
    model = DistributedDataParallel(config, buffers, layer)
    g = torch.Generator().manual_seed(3)
    model.zero_grad_buffer()
    for last in (False, True):
        x = torch.randn(*TOKENS, support.D, generator=g).to(dtype)
        with model.no_sync() if not last else contextlib.nullcontext():
            model(x)[0].float().square().mean().backward()
    model.finish_grad_sync()
    assert all(p.grad is None for p in layer.parameters())
    added = [getattr(w, "grad_added_to_main_grad", None) for w in layer.experts.parameters()]
    return {n: p.main_grad.clone() for n, p in layer.named_parameters()}, added


@pytest.mark.parametrize("overlap", [False, True])
def test_main_gradients_are_added_in_fp32(one_rank, overlap):
    for dtype in (torch.float32, torch.bfloat16):
        (fused, added), (plain, not_added) = (
            main_gradients(f, overlap, dtype) for f in (True, False)
        )
        assert added == [True, True] and not_added == [False, False]
        for name, want in plain.items():
            assert want.abs().max() > 0
            assert error(fused[name], want) < (1e-6 if dtype == torch.float32 else 2**-7), name
    # Neither the products nor their sums were rounded to bf16 before.
    for name in ("experts.weight1", "experts.weight2"):
        assert not torch.equal(fused[name], fused[name].bfloat16().float())
        assert not torch.equal(fused[name], plain[name])


def test_main_gradients_in_bf16_are_megatrons_to_add(one_rank):
    found, added = main_gradients(True, False, grad_reduce_in_fp32=False)
    assert added == [False, False]
    assert all(g.dtype == torch.bfloat16 and g.abs().max() > 0 for g in found.values())


def as_list(parts):
    return parts if isinstance(parts, list) else [parts]


def parts_of(value):
    """The shards of a checkpoint that a value of a sharded_state_dict describes."""
    parts = value.build() if isinstance(value, ShardedTensorFactory) else value
    return [part for part in as_list(parts) if isinstance(part, ShardedTensor)]


def place(part):
    """The index of the part in the whole tensor."""
    sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    return tuple(slice(o, o + s) for o, s in zip(part.global_offset, sizes, strict=True))


def saved(layer):
    """The whole tensors of a distributed checkpoint, without files: Megatron's save() forks, which
    fails in a process with OpenMP threads."""
    whole = {}
    for value in layer.sharded_state_dict().values():
        for part in parts_of(value):
            into = whole.setdefault(part.key, torch.full(part.global_shape, torch.nan))
            into[place(part)] = part.data.detach()
    return whole


def load(layer, whole):
    state = {}
    for name, value in layer.sharded_state_dict().items():
        parts = [whole[p.key][place(p)].view(p.local_shape) for p in parts_of(value)]
        if isinstance(value, ShardedTensorFactory):
            state[name] = value.merge_fn(parts if isinstance(value.build(), list) else parts[0])
        elif parts:
            state[name] = parts[0]
    layer.load_state_dict(state, strict=False)  # _extra_state is left out


@pytest.mark.parametrize("gated", [True, False])
def test_checkpoints_are_those_of_megatrons_own_experts(one_rank, gated):
    config = support.config_of(gated_linear_unit=gated)
    ours, theirs = pair(config)
    by_ours, by_theirs = saved(ours), saved(theirs)
    assert by_ours.keys() == by_theirs.keys() and len(by_ours) == 3
    assert all(torch.equal(by_ours[key], by_theirs[key]) for key in by_ours)
    new = support.layer_of(megatron.with_experts(support.own_spec()), config, seed=1)
    load(new, by_theirs)
    wanted = dict(ours.named_parameters())
    assert all(torch.equal(p, wanted[name]) for name, p in new.named_parameters())


class Projection(torch.nn.Linear):
    """TransformerEngine's linear layer, as MoELayer makes it for latent experts."""

    def __init__(self, rows, columns, *, init_method, **_):
        super().__init__(rows, columns, bias=False)
        init_method(self.weight)

    def forward(self, x):
        return super().forward(x), None


@pytest.fixture
def projections(monkeypatch):
    from megatron.core.transformer.moe import moe_layer

    monkeypatch.setattr(moe_layer, "HAVE_TE", True)
    monkeypatch.setattr(moe_layer, "TELinear", Projection, raising=False)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("latent", [16, 48])
def test_latent_experts(one_rank, projections, dispatcher, latent):
    """Nemotron-3's experts, whose tokens have another width than the model."""
    config = support.config_of(
        moe_latent_size=latent,
        moe_token_dispatcher_type=dispatcher,
        gated_linear_unit=False,
        activation_func=squared_relu,
    )
    ours, theirs = pair(config)
    with torch.no_grad():
        for name in ("fc1_latent_proj", "fc2_latent_proj"):
            getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    assert ours.experts.weight1.shape == (latent, support.N * support.E)
    assert ours.config.hidden_size == support.D  # the layer's own
    for got, want in zip(train(ours), train(theirs), strict=True):
        assert error(got, want) < 1e-4


def test_checkpoints_of_latent_experts(one_rank, projections):
    config = support.config_of(moe_latent_size=16)
    ours, theirs = pair(config)
    by_ours, by_theirs = saved(ours.experts), saved(theirs.experts)
    assert by_ours.keys() == by_theirs.keys() and len(by_ours) == 2
    assert all(torch.equal(by_ours[key], by_theirs[key]) for key in by_ours)
    new = support.layer_of(megatron.with_experts(support.own_spec()), config, seed=1)
    load(new.experts, by_theirs)
    wanted = dict(ours.experts.named_parameters())
    assert all(torch.equal(p, wanted[name]) for name, p in new.experts.named_parameters())


# How two ranks divide the experts: half of the experts each, or half of every expert's width.
SPLITS = {
    "experts": {"expert_model_parallel_size": 2},
    "width": {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "sequence_parallel": True,
    },
}


def parallel_errors(options, rank):
    """Errors of ours against theirs, both divided in the same way: output, dx and the rank's weight
    gradients."""
    layers = pair(support.config_of(**options))
    results = []
    for layer in layers:
        g = torch.Generator().manual_seed(rank)
        x = torch.randn(*TOKENS, support.D, generator=g).requires_grad_()
        out = layer(x)[0]
        out.square().sum().backward()
        results.append((out.detach(), x.grad, *of_experts(layer.experts, lambda p: p.grad)))
    assert results[0][3].numel() == support.E * support.N * support.D // 2
    return [error(got, want) for got, want in zip(*results, strict=True)]


def parallel_worker(rank, port, results):
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, 2, rank == 0)
    for split, options in SPLITS.items():
        sizes = {name: size for name, size in options.items() if name.endswith("_size")}
        with support.parallel(dist.PrefixStore(split, store), rank, 2, **sizes):
            for dispatcher in ("allgather", "alltoall"):
                chosen = options | {"moe_token_dispatcher_type": dispatcher}
                results.put((split, dispatcher, rank, parallel_errors(chosen, rank)))
    leave()


def test_parallelism_by_its_dispatchers():
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(parallel_worker, (free_port(), results), nprocs=2)
    found = [results.get() for _ in range(8)]
    assert len({(split, dispatcher, rank) for split, dispatcher, rank, _ in found}) == 8
    assert all(e < 1e-5 for *_, errors in found for e in errors)


@pytest.mark.skipif(not sonicmoe_cpp.is_available("cuda"), reason="needs a GPU of this build")
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_on_a_gpu_in_bf16(dispatcher):
    """Ours and theirs, both in bf16, against theirs in fp32."""
    options = {"moe_token_dispatcher_type": dispatcher}
    rounded = options | {"params_dtype": torch.bfloat16, "bf16": True}
    with support.parallel(dist.HashStore(), backend="nccl"):
        exact = pair(support.config_of(**options))[1].cuda()
        layers = [layer.cuda() for layer in pair(support.config_of(**rounded))]
        for parameter, value in zip(layers[1].parameters(), exact.parameters(), strict=True):
            parameter.data.copy_(value)
            value.data.copy_(parameter)
        layers[0].router.load_state_dict(layers[1].router.state_dict())
        for a, b in zip(*(of_experts(layer.experts) for layer in layers), strict=True):
            a.copy_(b)
        g = torch.Generator().manual_seed(3)
        x = torch.randn(*TOKENS, support.D, generator=g).bfloat16().cuda()
        results = []
        for layer in (*layers, exact):
            rows = x.to(layer.router.weight.dtype).requires_grad_()
            out = layer(rows)[0]
            out.float().square().mean().backward()
            results.append((out, rows.grad, *of_experts(layer.experts, lambda p: p.grad)))
        for ours, theirs, want in zip(*results, strict=True):
            assert error(ours, want) < 2 * error(theirs, want) + 2**-8


def gpt(spec):
    """A model with one dense layer and one with experts."""
    config = support.config_of(num_layers=2, moe_layer_freq=[0, 1], normalization="RMSNorm")
    torch.manual_seed(0)
    options = {"vocab_size": 96, "max_sequence_length": 16, "position_embedding_type": "rope"}
    return GPTModel(config, spec(get_gpt_decoder_block_spec(config, False)), **options)


def test_a_gpt_model_trains_as_with_megatrons_own_experts(one_rank):
    ours, theirs = gpt(megatron.with_experts), gpt(lambda spec: spec)
    state = {n: p for n, p in theirs.state_dict().items() if "experts" not in n}
    ours.load_state_dict(state, strict=False)
    layers = [model.decoder.layers[1].mlp.experts for model in (ours, theirs)]
    assert isinstance(layers[0], megatron.SonicMoECppExperts)
    for mine, other in zip(*map(of_experts, layers), strict=True):
        mine.copy_(other)
    ids = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(3))
    places, mask = torch.arange(12).expand(2, 12), torch.ones(1, 1, 12, 12).triu(1).bool()
    losses = []
    for model in (ours, theirs):
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(ids, places, mask, labels=ids).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    losses = torch.stack(losses).view(2, 5)
    assert losses[1, -1] < 0.9 * losses[1, 0]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)


def test_a_layer_spec_is_made_by_name(one_rank):
    config = support.config_of(num_layers=2, normalization="RMSNorm")
    spec = megatron.gpt_layer_spec(transformer_engine=False, qk_layernorm=True)
    model = GPTModel(config, spec, vocab_size=96, max_sequence_length=16)
    kinds = [type(layer.mlp.experts) for layer in model.decoder.layers]
    assert kinds == [megatron.SonicMoECppExperts] * 2


def test_a_spec_is_copied_and_a_dense_one_refused():
    spec = get_gpt_layer_local_spec(num_experts=4)
    replaced = megatron.with_experts(spec)
    assert spec.submodules.mlp.submodules.experts.module is not megatron.SonicMoECppExperts
    assert replaced.submodules.mlp.submodules.experts is megatron.EXPERTS
    with pytest.raises(ValueError, match="the spec has no MoE layer"):
        megatron.with_experts(get_gpt_layer_local_spec())


REFUSED = {
    "add_bias_linear is set": {"add_bias_linear": True},
    r"moe_ffn_hidden_size=\[24, 8\] is set": {"moe_ffn_hidden_size": [24, 8]},
    r"activation \(silu_and_more": {"activation_func": lambda x: F.silu(x) + 1},
    "fp8 or fp4 is set": {"fp8": "hybrid"},
    "delay_wgrad_compute is set": {"delay_wgrad_compute": True},
    r"offload_modules=\['moe_act'\] is set": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["moe_act"],
    },
}
REFUSED[r"activation \(silu_and_more"]["activation_func"].__name__ = "silu_and_more"


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals(one_rank, sentence):
    config = support.config_of()
    for name, value in REFUSED[
        sentence
    ].items():  # set after the checks of other packages' versions
        setattr(config, name, value)
    groups = support.moe_utils.get_default_pg_collection()
    with pytest.raises(NotImplementedError, match=sentence):
        megatron.SonicMoECppExperts(4, config, groups)


@pytest.mark.parametrize("problem", ["0.19.2 is installed", "No package metadata"])
def test_another_megatron_is_refused(monkeypatch, problem):
    from importlib import metadata

    def version(name):
        if "is installed" in problem:
            return problem.split()[0]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delitem(sys.modules, megatron.__name__)
    with pytest.raises(ImportError, match=f"needs megatron-core 0.16: .*{problem}"):
        importlib.import_module(megatron.__name__)

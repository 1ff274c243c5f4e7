"""NeMo AutoModel's MoE layer with experts of this library, against its own experts."""

import copy
import sys
import types
from importlib import metadata

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from reference import error
from sonicmoe_cpp.integrations import nemo_automodel
from sonicmoe_cpp.integrations._recognise import local
from worlds import free_port, leave

MODULE = "nemo_automodel.components.moe.experts"
package = pytest.importorskip(MODULE, reason="nemo-automodel is not installed")
from nemo_automodel.components.models.common import BackendConfig  # noqa: E402
from nemo_automodel.components.moe.config import MoEConfig  # noqa: E402
from nemo_automodel.components.moe.layers import MoE  # noqa: E402

E, D, N, K = 6, 32, 24, 2
DEFAULT = {
    "n_routed_experts": E,
    "n_shared_experts": 1,
    "n_activated_experts": K,
    "n_expert_groups": 1,
    "n_limited_groups": 1,
    "train_gate": True,
    "gate_bias_update_factor": 0.0,
    "aux_loss_coeff": 0.0,
    "score_func": "softmax",
    "route_scale": 1.0,
    "dim": D,
    "inter_dim": N,
    "moe_inter_dim": N,
    "norm_topk_prob": True,
    "dtype": torch.float32,
}


@pytest.fixture(autouse=True)
def eager():
    """NeMo compiles its activations with max_autotune; here they run uncompiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


def keep_theirs(patch):
    """Restores NeMo's functions when the patch ends, whatever replaced them."""
    for kind, name in nemo_automodel._SEAM:
        patch.setattr(getattr(package, kind), name, vars(getattr(package, kind))[name])


@pytest.fixture
def replaced():
    """NeMo's classes with our functions, until the test ends."""
    with pytest.MonkeyPatch.context() as patch:
        keep_theirs(patch)
        yield nemo_automodel.replace


def layer_of(experts="torch", **options):
    torch.manual_seed(0)
    backend = BackendConfig(
        linear="torch", attn="sdpa", rms_norm="torch", experts=experts, dispatcher="torch"
    )
    layer = MoE(MoEConfig(**(DEFAULT | options)), backend)
    with torch.no_grad():
        layer.init_weights(torch.device("cpu"), init_std=0.3)
        for name, parameter in layer.experts.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return layer


def step(layer, x, mask, target):
    loss = F.mse_loss(layer(x, padding_mask=mask), target)
    loss.backward()
    return loss


def train(layer, steps=5):
    """Losses, and the input's gradient, of a few steps of Adam; some tokens are padding."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2, 11, D, generator=g).requires_grad_()
    target = torch.randn(2, 11, D, generator=g)
    mask = torch.rand(2, 11, generator=g) < 0.2
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(step(layer, x, mask, target).item())
        optimizer.step()
    return torch.tensor(losses), x.grad


CONFIGS = {
    "swiglu": {},
    "swiglu, bias": {"expert_bias": True},
    "DeepSeek-V3": {
        "score_func": "sigmoid",
        "n_expert_groups": 2,
        "n_limited_groups": 1,
        "gate_bias_update_factor": 1e-3,
        "route_scale": 2.5,
    },
    "DeepSeek-V4": {"swiglu_limit": 0.5},
    "gpt-oss": {"expert_activation": "quick_geglu", "expert_bias": True, "activation_limit": 1.0},
    "swigluoai": {"expert_activation": "swigluoai", "activation_limit": 1.0},
    "geglu": {"expert_activation": "geglu"},
    "relu2": {"expert_activation": "relu2"},
    "weights after down": {"apply_router_weight_after_down": True},
}


@pytest.mark.parametrize("experts", ["torch", "torch_mm"])
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_training_is_that_of_automodels_own_experts(replaced, options, experts):
    theirs = layer_of(experts, **options)
    ours = copy.deepcopy(theirs)
    wanted, wanted_dx = train(theirs)
    replaced()
    losses, dx = train(ours)
    assert wanted[-1] < 0.95 * wanted[0]
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    assert error(dx, wanted_dx) < 1e-3
    for (name, got), want in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert error(got, want) < 1e-3, name


def test_a_rank_computes_its_own_experts_alone(replaced):
    """The replaced function gets the ids of all experts, but the weights of this rank's experts
    only."""
    theirs = layer_of("torch_mm").experts
    g = torch.Generator().manual_seed(3)
    x = torch.randn(9, D, generator=g)
    ids = torch.rand(9, E, generator=g).topk(K).indices
    weights = torch.rand(9, K, generator=g)
    mask = torch.arange(9) != 4
    mine = (theirs.gate_and_up_projs[2:4], theirs.down_projs[2:4], None, None, 2, 2)
    want = theirs._forward_loop(x, weights, ids, mask, *mine, 4)
    replaced()
    for got in (
        theirs._forward_loop(x, weights, ids, mask, *mine, 4),
        theirs._forward_grouped_mm(x, mask, weights, ids, *mine),
    ):
        assert got.dtype == torch.float32 and error(got, want) < 1e-5
        assert (got[4] == 0).all()


def split_worker(rank, port, results):
    """One of two ranks: it has half of the experts and another number of tokens than the other
    rank."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    torch.compiler.set_stance("force_eager")
    for form in ("torch", "torch_mm"):
        experts = layer_of(form, expert_bias=True).experts
        for name, parameter in list(experts.named_parameters()):
            setattr(
                experts, name, torch.nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
            )
        outs = []
        for replace in (lambda: None, nemo_automodel.replace):
            with pytest.MonkeyPatch.context() as patch:
                keep_theirs(patch)
                replace()
                g = torch.Generator().manual_seed(rank)
                tokens = 7 + 4 * rank
                x = torch.randn(tokens, D, generator=g).requires_grad_()
                ids = torch.rand(tokens, E, generator=g).topk(K).indices
                weights = torch.rand(tokens, K, generator=g).requires_grad_()
                out = experts(x, torch.arange(tokens) != 4, weights, ids)
                leaves = [x, weights, *experts.parameters()]
                grads = torch.autograd.grad(out.square().sum(), leaves)
                outs.append([local(t).detach() for t in (out, *grads)])
        results.put((form, rank, [error(got, want) for want, got in zip(*outs, strict=True)]))
    leave()


def test_expert_parallelism():
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(split_worker, (free_port(), results), nprocs=2)
    found = [results.get() for _ in range(4)]
    assert len({(form, rank) for form, rank, _ in found}) == 4
    assert all(e < 1e-5 for *_, errors in found for e in errors)


class Dispatcher:
    """Stands in for DeepEP's dispatcher on one rank: sorts rows by expert, and sums them back by
    token."""

    def token_permutation2(self, hidden_states, num_local_tokens, token_probs, token_indices):
        ids = token_indices.flatten()
        ids = torch.where(ids < 0, E, ids)
        self.order = ids.argsort(stable=True)[: int((ids < E).sum())]
        self.tokens = num_local_tokens
        rows = hidden_states[self.order // K]
        counts = torch.bincount(ids, minlength=E + 1)[:E]
        return rows, counts, token_probs.flatten()[self.order]

    def token_unpermutation(self, rows):
        out = rows.new_zeros(self.tokens, rows.shape[1])
        return out.index_add(0, self.order // K, rows)


@pytest.mark.parametrize("name", ["swiglu", "gpt-oss", "relu2"])
def test_rows_of_a_flex_dispatcher(replaced, name):
    """GroupedExpertsDeepEP between the dispatcher's two calls, against NeMo's loop over experts."""
    plain = layer_of(**CONFIGS[name]).experts
    deepep = package.GroupedExpertsDeepEP(plain.config)
    deepep.load_state_dict(plain.state_dict())
    deepep.n_routed_experts, deepep.ep_size, deepep.token_dispatcher = E, 1, Dispatcher()
    replaced_forward = deepep.__class__.forward
    g = torch.Generator().manual_seed(3)
    x = torch.randn(9, D, generator=g)
    ids = torch.rand(9, E, generator=g).topk(K).indices
    mask = torch.arange(9) != 4
    results = []
    for experts in (plain, deepep):
        leaves = [x.clone().requires_grad_(), torch.rand(9, K, generator=g.manual_seed(4))]
        leaves[1].requires_grad_()
        if experts is deepep:
            replaced()
            assert deepep.__class__.forward is not replaced_forward
        out = experts(leaves[0], mask, leaves[1], ids)
        grads = torch.autograd.grad(out.square().sum(), [*leaves, *experts.parameters()])
        results.append((out, *grads))
    for want, got in zip(*results, strict=True):
        assert error(got, want) < 1e-5


def test_refusals(replaced):
    replaced()
    x = torch.randn(1, 3, D)
    for options, sentence in (
        (
            {"expert_activation": "swigluoai", "activation_limit": 0.0},
            "activation_limit=0.0 is not one",
        ),
        ({}, 'experts="torch_mm_mxfp8" is set'),
    ):
        layer = layer_of(**options)
        layer.experts.use_mxfp8 = not options
        with pytest.raises(NotImplementedError, match=sentence):
            layer(x)


def test_another_automodel_is_refused(monkeypatch, replaced):
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: "0.8.0")
        with pytest.raises(ImportError, match=r"needs nemo-automodel 0\.7: 0\.8\.0 is installed"):
            replaced()
    with monkeypatch.context() as patch:
        theirs = package.GroupedExperts._forward_loop
        patch.setattr(package.GroupedExperts, "_forward_grouped_mm", lambda self, x: x)
        changed = "GroupedExperts._forward_grouped_mm takes self, x, must take self, x, token_mask"
        with pytest.raises(ImportError, match=rf"needs nemo-automodel 0\.7: {changed}"):
            replaced()
        assert package.GroupedExperts._forward_loop is theirs  # nothing was replaced
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, MODULE, types.SimpleNamespace())
        with pytest.raises(ImportError, match=r"0\.7: .* has no GroupedExperts._forward_loop"):
            replaced()
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(ImportError, match=r"needs nemo-automodel 0\.7: "):
        replaced()

"""torch.compile(fullgraph=True) makes one graph, and no other graph when T changes."""

import functools

import pytest
import sonicmoe_cpp
import torch

E, K, D, N = 6, 2, 16, 8


def parameters():
    g = torch.Generator().manual_seed(0)
    w_up = torch.randn(E, 2 * N, D, generator=g).requires_grad_()
    w_down = torch.randn(E, D, N, generator=g).requires_grad_()
    return w_up, w_down


def inputs(tokens):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, D, generator=g).requires_grad_()
    return x, torch.randn(tokens, E, generator=g).requires_grad_()


def topk(x, logits, w_up, w_down):
    ids, weights = sonicmoe_cpp.route(logits, K)
    return sonicmoe_cpp.moe(x, ids, weights, w_up, w_down)


def rounded(x, logits, w_up, w_down):
    pairs = sonicmoe_cpp.token_round(logits, K, tile=4, mode="balanced")
    return sonicmoe_cpp.moe_pairs(x, pairs, w_up, w_down)


def chosen(x, logits, w_up, w_down):
    pairs = sonicmoe_cpp.expert_choice(logits, 3 * x.shape[0] // E)
    return sonicmoe_cpp.moe_pairs(x, pairs, w_up, w_down)


def grouped(x, logits, w_up, w_down):
    offsets = torch.arange(E + 1) * (x.shape[0] // E)
    row_weights = logits.sigmoid()[:, 0]
    return sonicmoe_cpp.moe_grouped(x, offsets, w_up, w_down, row_weights=row_weights)


def activated(x, logits, w_up, w_down):
    activation = sonicmoe_cpp.Activation("swiglu_oai", limit=2.0)
    ids, weights = sonicmoe_cpp.route(logits, K, score="sqrt_softplus", renormalize=True)
    gate, up = w_up.chunk(2, dim=1)
    return sonicmoe_cpp.moe(x, ids, weights, (gate, up), w_down, activation=activation)


def step(function, values):
    out = function(*values)
    return out, *torch.autograd.grad(out.square().sum(), values)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


# Any second compilation of the same code is an error.
compiled_once = torch._dynamo.config.patch(error_on_recompile=True)


def check(function, compiled, sizes):
    for tokens in sizes:
        values = (*inputs(tokens), *parameters())
        for got, want in zip(step(compiled, values), step(function, values), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", [topk, rounded, chosen, grouped, activated])
def test_one_graph_for_every_number_of_tokens(function):
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    with compiled_once:
        check(function, compiled, (24, 30, 96, 13))


def test_sizes_become_symbolic_by_themselves():
    compiled = torch.compile(topk, fullgraph=True, backend="aot_eager")
    check(topk, compiled, (24, 30))
    with compiled_once:
        check(topk, compiled, (96, 13, 14))


@pytest.mark.slow
@pytest.mark.parametrize("function", [topk, rounded])
def test_inductor(function):
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    check(function, compiled, (24, 31))


@pytest.mark.parametrize("routing", ["topk", "token_rounding"])
def test_module(routing):
    options = {"routing": routing, "tile": 4, "rounding": "stochastic", "lb_coef": 0.1}
    module = sonicmoe_cpp.MoE(E, K, D, N, bias=True, **options)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (24, 40, 57):
        x = torch.randn(2, tokens, D)
        losses = []
        for function in (compiled, module):
            torch.manual_seed(tokens)
            with compiled_once:
                out, aux = function(x)
            loss = out.square().sum() + aux.loss
            grads = torch.autograd.grad(loss, list(module.parameters()))
            losses.append((loss, *grads))
        for got, want in zip(*losses, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_module_with_few_tokens():
    module = sonicmoe_cpp.MoE(E, K, D, N, routing="token_rounding", tile=256)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    x = torch.randn(20, D)
    assert torch.equal(compiled(x)[0], module.eval()(x)[0])


def test_inference():
    compiled = torch.compile(topk, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        values = (*inputs(20), *parameters())
        assert torch.equal(compiled(*values), topk(*values))


def test_main_gradients():
    w_up, w_down = parameters()

    def accumulate(x, logits, g_up, g_down):
        ids, weights = sonicmoe_cpp.route(logits, K)
        return sonicmoe_cpp.moe(x, ids, weights, w_up, w_down, grad_accum=(g_up, g_down))

    results = []
    for function in (accumulate, torch.compile(accumulate, fullgraph=True, backend="aot_eager")):
        x, logits = inputs(20)
        buffers = torch.zeros_like(w_up).detach(), torch.zeros_like(w_down).detach()
        for _ in range(2):
            function(x, logits, *buffers).square().sum().backward()
        assert w_up.grad is None and w_down.grad is None
        results.append((x.grad, logits.grad, *buffers))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_a_refusal_names_the_argument():
    compiled = torch.compile(topk, fullgraph=True, backend="aot_eager")
    x, logits = inputs(20)
    w_up, w_down = parameters()
    with pytest.raises(Exception, match="w_down has shape"):
        compiled(x, logits, w_up, w_down[:, :3])


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_stochastic_rounding_is_not_drawn_again_in_backward(budget):
    pytest.importorskip("networkx", reason="torch's partitioner needs networkx")
    torch.manual_seed(0)
    options = {"routing": "token_rounding", "rounding": "stochastic", "tile": 4}
    layer = sonicmoe_cpp.MoE(E, K, D, N, **options)
    first = torch.nn.Linear(D, D)
    leaves = [*layer.parameters(), *first.parameters()]

    def run(x):
        return layer(torch.relu(first(x)))[0].sin().sum()

    def gradients(function):
        torch.manual_seed(7)
        return torch.autograd.grad(function(torch.randn(64, D)), leaves)

    compile = functools.partial(torch.compile, run, backend="aot_eager_decomp_partition")
    want = gradients(run)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        got = gradients(compile())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        if budget < 1:
            torch._dynamo.reset()
            with pytest.raises(Exception, match='rounding="stochastic" draws its seed outside'):
                gradients(compile(fullgraph=True))

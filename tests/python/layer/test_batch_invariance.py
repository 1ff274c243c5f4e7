"""A token's results have the same bits whatever else is in the batch (docs/determinism.md)."""

import pytest
import reference
import sonicmoe_cpp as smoe
import torch
import worlds
from devices import DEVICES, DTYPES
from sonicmoe_cpp.distributed import moe_expert_parallel

pytestmark = pytest.mark.usefixtures("each_engine")

# (T, d, n, E, K), and numbers of tokens that are cut out of the batch. On CUDA the tiles, their
# order and which kernels overlap depend on the mean rows of an expert (T*K/E) and on n. The cuts
# give an expert 1 to 2048 rows.
SMALL = ((300, 72, 40, 8, 2), (1, 4, 43, 150))
STEPS = ((8192, 512, 256, 8, 2), (1, 4, 160, 400, 600, 800, 1200, 2800, 4400))
# d and n of fp8 are multiples of 128.
SMALL_FP8 = ((300, 256, 128, 8, 2), (1, 4, 43, 150))
WIDE = ((6144, 768, 512, 12, 4), (4, 200, 400, 800, 3100))


class Batch:
    def __init__(self, shape, device, dtype, activation="swiglu", bias=False, **options):
        tokens, hidden, width, self.experts, self.k = shape
        rows = 2 * width if reference.is_gated(activation) else width
        generator = torch.Generator().manual_seed(3)

        def normal(*size, scale=1.0, of=dtype):
            return (torch.randn(*size, generator=generator) * scale).to(device, of)

        self.x, self.dout = normal(tokens, hidden), normal(tokens, hidden)
        self.logits = normal(tokens, self.experts, of=torch.float32)
        self.weights = {
            "w_up": normal(self.experts, rows, hidden, scale=hidden**-0.5),
            "w_down": normal(self.experts, hidden, width, scale=width**-0.5),
            "activation": activation,
            **options,
        }
        if bias:
            self.weights |= {
                "b_up": normal(self.experts, rows),
                "b_down": normal(self.experts, hidden),
            }

    def results(self, rows, layer):
        """out, dx and the gradient of the logits, computed for these rows alone."""
        x = self.x[rows].requires_grad_()
        logits = self.logits[rows].requires_grad_()
        out = layer(self, x, logits)
        out.backward(self.dout[rows])
        return {"out": out.detach(), "dx": x.grad, "dlogits": logits.grad}


def by_ids(batch, x, logits, **route):
    ids, weights = smoe.route(logits, batch.k, **route)
    return smoe.moe(x, ids, weights, **batch.weights)


def by_pairs(batch, x, logits):
    ids, weights = smoe.route(logits, batch.k)
    expert, order = ids.int().flatten().sort(stable=True)
    token = torch.div(order, batch.k, rounding_mode="floor").int()
    ends = torch.bincount(expert, minlength=batch.experts).cumsum(0)
    pairs = smoe.Pairs(
        token, expert, weights.flatten()[order], torch.nn.functional.pad(ends, (1, 0))
    )
    return smoe.moe_pairs(x, pairs, **batch.weights)


def by_groups(batch, x, logits):
    """Grouped rows: every token goes to its best expert; rows of an expert are in the order of
    tokens."""
    ids, weights = smoe.route(logits, 1)
    expert, order = ids.flatten().sort(stable=True)
    ends = torch.bincount(expert, minlength=batch.experts).cumsum(0)
    offsets = torch.nn.functional.pad(ends, (1, 0))
    row_weights = weights.flatten()[order]
    out = smoe.moe_grouped(x[order], offsets, row_weights=row_weights, **batch.weights)
    return out[order.argsort()]


def cuts(count, tokens, device):
    """`count` tokens from the front, from the end, and spread over the batch."""
    rows = torch.arange(tokens, device=device)
    return rows[:count], rows[tokens - count :], rows[:: max(1, tokens // count)][:count]


def assert_invariant(batch, layer, counts):
    tokens = len(batch.x)
    whole = batch.results(torch.arange(tokens, device=batch.x.device), layer)
    for count in counts:
        for rows in cuts(count, tokens, batch.x.device):
            for name, part in batch.results(rows, layer).items():
                assert torch.equal(part, whole[name][rows]), (name, count, rows[:3].tolist())


@pytest.mark.parametrize("layer", [by_ids, by_pairs, by_groups])
@pytest.mark.parametrize(("device", "dtype"), DTYPES)
def test_every_form(device, dtype, layer):
    shape, counts = SMALL
    assert_invariant(Batch(shape, device, dtype, bias=True), layer, counts)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize(("device", "dtype"), DTYPES)
def test_every_activation(device, dtype, activation):
    shape, counts = SMALL
    assert_invariant(Batch(shape, device, dtype, activation), by_ids, counts)


@pytest.mark.parametrize("score", ["softmax_before_topk", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_score(device, score):
    shape, counts = SMALL
    batch = Batch(shape, device, torch.bfloat16)
    assert_invariant(
        batch, lambda *args: by_ids(*args, score=score, renormalize=True, scale=2.5), counts
    )


@pytest.mark.parametrize("case", [STEPS, WIDE], ids=["n256", "n512"])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_where_tiles_change(device, case):
    shape, counts = case
    for dtype in (torch.bfloat16, torch.float16):
        assert_invariant(Batch(shape, device, dtype), by_ids, counts)


def skip_without_fp8(device):
    """Skips a GPU whose engine has no fp8."""
    if device == "cuda":
        try:
            batch = fp8_batch((1, 128, 128, 1, 1), device)
            by_ids(batch, batch.x, batch.logits)
        except NotImplementedError as error:
            pytest.skip(str(error))


def fp8_batch(shape, device, activation="swiglu", **options):
    return Batch(shape, device, torch.bfloat16, activation, precision="fp8", **options)


@pytest.mark.parametrize("keep_h", [None, "bf16"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("layer", [by_ids, by_pairs, by_groups])
@pytest.mark.parametrize("device", DEVICES)
def test_fp8(device, layer, activation, keep_h):
    skip_without_fp8(device)
    shape, counts = SMALL_FP8
    batch = fp8_batch(shape, device, activation, bias=True, keep_h=keep_h)
    assert_invariant(batch, layer, counts)


@pytest.mark.parametrize("case", [STEPS, WIDE], ids=["n256", "n512"])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_fp8_where_tiles_change(device, case):
    skip_without_fp8(device)
    shape, counts = case
    assert_invariant(fp8_batch(shape, device), by_ids, counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads, dtype):
    shape, counts = SMALL
    batch = Batch(shape, "cpu", dtype)
    whole = batch.results(torch.arange(len(batch.x)), by_ids)
    torch.set_num_threads(threads)
    for count in counts:
        part = batch.results(torch.arange(count), by_ids)
        assert all(torch.equal(part[name], whole[name][:count]) for name in whole)


def over_ranks(rank, size, folder):
    """Expert parallelism. The numbers of tokens that this rank cuts out differ from those of the
    other rank, whose tokens are others."""
    torch.manual_seed(rank)
    (tokens, *sizes, experts, k), counts = SMALL
    for dtype in (torch.float32, torch.bfloat16):
        batch = Batch((tokens, *sizes, experts, k), "cpu", dtype)
        order = torch.randperm(tokens)
        batch.x, batch.logits = batch.x[order], batch.logits[order]
        own = slice(rank * experts // size, (rank + 1) * experts // size)
        for name in ("w_up", "w_down"):
            batch.weights[name] = batch.weights[name][own]

        def layer(batch, x, logits):
            ids, weights = smoe.route(logits, batch.k)
            return moe_expert_parallel(x, ids, weights, **batch.weights)

        assert_invariant(batch, layer, counts if rank == 0 else counts[::-1])


@pytest.mark.slow
def test_expert_parallelism(tmp_path):
    for found in worlds.run(over_ranks, 2, tmp_path):
        assert "error" not in found, found["traceback"]


@pytest.mark.parametrize("device", DEVICES)
def test_token_rounding_is_not_and_the_comparison_sees_it(device):
    def rounded(batch, x, logits):
        return smoe.moe_pairs(x, smoe.token_round(logits, batch.k, tile=16), **batch.weights)

    shape, counts = SMALL
    with pytest.raises(AssertionError, match="out"):
        assert_invariant(Batch(shape, device, torch.bfloat16), rounded, counts)

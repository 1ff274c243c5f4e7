"""The rivals of benchmarks/ on the CPU: they compute what the checker expects, and the checker
rejects wrong results."""

import importlib
import importlib.machinery
import sys
import types

import pytest
import torch

SHAPE = (96, 64, 32, 8, 2)


@pytest.fixture
def bench():
    """(contenders, a checker over drawn data)"""
    from h200_bench import check, contenders, layer

    data = layer.Data(layer.Shape(*SHAPE), torch.device("cpu"))
    data.sample(0)
    return contenders, check.Checker(data)


def run(contenders, checker, layer):
    checker.check_autograd("layer", *contenders.contender(checker.data, layer).results())


def test_our_front_end_agrees(bench):
    contenders, checker = bench
    run(contenders, checker, contenders.torch_front_end(checker.data.shape, "cpu"))


@pytest.mark.parametrize("unused", [False, True])
def test_the_loop_over_experts_agrees(bench, unused):
    contenders, checker = bench
    data = checker.data
    if unused:  # no token goes to expert 3
        data.logits[:, 3] = -50.0
        checker = type(checker)(data)
    run(contenders, checker, contenders.LAYERS["loop"](data.shape))


def test_the_stand_in_for_sonicmoe_agrees(bench, monkeypatch):
    import sonicmoe_cpp.compat.sonicmoe as stand_in
    from sonicmoe_cpp.compat.sonicmoe import enums, functional

    contenders, checker = bench
    modules = {"sonicmoe": stand_in, "sonicmoe.enums": enums, "sonicmoe.functional": functional}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    run(contenders, checker, contenders.LAYERS["sonicmoe"](checker.data.shape))


def test_transformers_agrees(bench):
    pytest.importorskip("transformers.integrations.moe")
    contenders, checker = bench
    run(contenders, checker, contenders.LAYERS["transformers"](checker.data.shape))


def sorted_pairs(expert_idxs, num_experts):
    """What scattermoe returns: the sorted experts, the pairs in this order, and the end of each
    expert."""
    experts, pairs = expert_idxs.flatten().sort()
    return experts, pairs, expert_idxs.flatten().bincount(minlength=num_experts).cumsum(-1)


def products_by_expert(
    inputs, weights, k, experts, pairs, ends, biases=None, gates=None,
    grouped_in=False, grouped_out=False,
):  # fmt: skip
    """scattermoe's grouped product. Input and output rows are by token and k, or sorted by expert
    (grouped_in, grouped_out)."""
    rows = inputs if grouped_in else inputs[pairs // k]
    out = torch.einsum("ri,rio->ro", rows, weights[experts])
    if not grouped_out:
        out = torch.zeros_like(out).index_copy(0, pairs, out)
    if gates is not None:
        out = (gates.unsqueeze(-1) * out.view(*gates.shape, -1)).sum(1)
    return out


def test_the_layer_around_scattermoe_agrees(bench, monkeypatch):
    contenders, checker = bench
    with pytest.raises(ImportError):
        contenders.LAYERS["scattermoe"](checker.data.shape)
    products = types.ModuleType("scattermoe.parallel_experts")
    products.flatten_sort_count, products.parallel_linear = sorted_pairs, products_by_expert
    monkeypatch.setitem(sys.modules, "scattermoe", types.ModuleType("scattermoe"))
    monkeypatch.setitem(sys.modules, "scattermoe.parallel_experts", products)
    run(contenders, checker, contenders.LAYERS["scattermoe"](checker.data.shape))


class MoMoE(torch.nn.Module):
    """momoe's layer: weights (E, d, 2n) with the gate second, every expert's mask and scores."""

    def __init__(
        self, embedding_dim, intermediate_dim, num_experts, num_chosen_experts, save_percent=0,
        Wl1_ND2H=None, Wl2_NHD=None,
    ):  # fmt: skip
        super().__init__()
        assert 0 <= save_percent <= 100
        self.K, self.H = num_chosen_experts, intermediate_dim
        self.Wl1_ND2H = torch.nn.Parameter(Wl1_ND2H.clone())
        self.Wl2_NHD = torch.nn.Parameter(Wl2_NHD.clone())

    def forward(self, x_BSD, mask_NM, s_NM):
        assert mask_NM.dtype == torch.int32 and (mask_NM.sum(0) == self.K).all()
        x = x_BSD.flatten(0, 1)
        out = torch.zeros(x.shape)
        for e, mask in enumerate(mask_NM.bool()):
            linear, gate = (x[mask] @ self.Wl1_ND2H[e]).split(self.H, dim=-1)
            y = (torch.nn.functional.silu(gate) * linear) @ self.Wl2_NHD[e]
            out[mask] = out[mask] + y.float() * s_NM[e, mask, None]
        return out.to(x.dtype).view(x_BSD.shape), mask_NM.sum(1)


@pytest.mark.parametrize("name", ["momoe", "momoe_saving"])
def test_the_layer_around_momoe_agrees(bench, monkeypatch, name):
    contenders, checker = bench
    with pytest.raises(ImportError):
        contenders.LAYERS[name](checker.data.shape)
    monkeypatch.setitem(sys.modules, "momoe", types.SimpleNamespace(MoMoE=MoMoE))
    run(contenders, checker, contenders.LAYERS[name](checker.data.shape))


ALIGNMENT = 64


def blocks_of(layout):
    """(expert, rows) of each block that is computed; the block's first row names its expert."""
    assert layout.dtype == torch.int32 and layout.is_contiguous()
    assert layout.numel() % ALIGNMENT == 0
    for begin in range(0, layout.numel(), ALIGNMENT):
        block = layout[begin : begin + ALIGNMENT]
        assert ((block == block[0]) | (block == -1)).all(), "experts begin between blocks"
        if block[0] >= 0:
            yield block[0].item(), slice(begin, begin + ALIGNMENT)


def grouped_nt(a, b, d, grouped_layout):
    """DeepGEMM's product in which M differs between experts. It does not write skipped rows: NaN
    here."""
    assert a.is_contiguous() and d.is_contiguous() and a.dtype == b.dtype == d.dtype
    assert 1 in b.stride()[1:] and a.shape[1] == b.shape[2]
    d.fill_(float("nan"))
    for e, rows in blocks_of(grouped_layout):
        d[rows] = a[rows] @ b[e].T


def grouped_over_rows(a, b, d, ks, ks_tensor, c):
    """DeepGEMM's product in which K differs between experts, for Hopper: it needs the sizes on host
    and device, and adds to fp32 only."""
    assert a.is_contiguous() and b.is_contiguous() and d.dtype == torch.float32 and c is d
    assert ks == ks_tensor.tolist() and ks_tensor.dtype == torch.int32
    assert sum(ks) == a.shape[0] == b.shape[0] and not any(k % 128 for k in ks)
    ends = torch.tensor(ks).cumsum(0).tolist()
    for e, (k, end) in enumerate(zip(ks, ends, strict=True)):
        d[e] += a[end - k : end].float().T @ b[end - k : end].float()


@pytest.fixture
def deep_gemm(monkeypatch):
    """A stand-in for the package deep_gemm, in sys.modules. The code around its products is not
    compiled."""
    module = types.ModuleType("deep_gemm")
    module.m_grouped_bf16_gemm_nt_contiguous = grouped_nt
    module.k_grouped_bf16_gemm_tn_contiguous = grouped_over_rows
    module.get_mk_alignment_for_contiguous_layout = lambda: ALIGNMENT
    module.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    return module


def test_the_layer_around_deep_gemm_agrees(bench, deep_gemm):
    contenders, checker = bench
    run(contenders, checker, contenders.LAYERS["deep_gemm"](checker.data.shape))


def test_the_layer_around_deep_gemm_takes_any_routing(bench, deep_gemm):
    from h200_bench import deepgemm

    for counts in ([0, 1, 127, 128, 129, 0], [0, 0, 0, 0, 0, 300], [0] * 6):
        ids = torch.arange(6).repeat_interleave(torch.tensor(counts)).unsqueeze(-1)
        rows = deepgemm.arrange(ids, 6, 128)
        assert rows.sizes.tolist() == [-(-count // 128) * 128 for count in counts]
        assert torch.equal(rows.expert[rows.row_of_slot], ids.int())
        assert torch.equal(rows.token[rows.row_of_slot].flatten(), torch.arange(len(ids)))
        assert (rows.expert >= 0).sum() == rows.sizes.sum()


def test_without_weight_gradients_deep_gemm_is_timed_forward_only(bench, deep_gemm, rivals):
    contenders, checker = bench
    del deep_gemm.k_grouped_bf16_gemm_tn_contiguous
    layer = contenders.LAYERS["deep_gemm"](checker.data.shape)
    found = contenders.contender(checker.data, layer)
    assert not hasattr(found, "both")
    checker.check_autograd("deep_gemm", *found.results())
    state = rivals.availability(checker.data.shape)["deep_gemm"]
    assert state.startswith("timed, forward only: it has no k_grouped_bf16_gemm_tn_contiguous")


@pytest.fixture
def rivals(bench, monkeypatch):
    """benchmarks/rivals.py, with our layer and those of other packages on the CPU."""
    import rivals

    contenders, _ = bench
    ours = {"ours_torch": lambda shape: contenders.torch_front_end(shape, "cpu")}
    monkeypatch.setattr(contenders, "LAYERS", ours | contenders.packages.LAYERS)
    return rivals


def test_absent_rivals_are_named(bench, rivals):
    contenders, checker = bench
    found = rivals.availability(checker.data.shape)
    assert found.keys() == contenders.LAYERS.keys()
    assert found["momoe"] == found["momoe_saving"] == found["deep_gemm"] == "absent"
    assert found["ours_torch"] == "timed"


def other_signature(a, b, d):
    """The signature of another version of the package."""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"m_grouped_bf16_gemm_nt_contiguous": None}, "ImportError: cannot import name"),
        ({"m_grouped_bf16_gemm_nt_contiguous": other_signature}, "TypeError: other_signature()"),
        ({"m_grouped_bf16_gemm_nt_contiguous": lambda a, b, d, layout: d.zero_()}, "SystemExit: "),
    ],
    ids=["a name is missing", "other arguments", "wrong results"],
)
def test_versions_that_do_not_fit_are_named(bench, deep_gemm, rivals, changes, reason):
    _, checker = bench
    for name, value in changes.items():
        delattr(deep_gemm, name)
        if value is not None:
            setattr(deep_gemm, name, value)
    found = rivals.availability(checker.data.shape)
    seconds = rivals.first_calls(found, checker.data.shape, "cpu")
    sentence = "installed, but this version does not fit: "
    assert found["deep_gemm"].startswith(sentence + reason)
    assert "ours_torch" in seconds and "deep_gemm" not in seconds


def test_the_page_tells_who_was_not_timed(bench):
    from pages import layers

    shape = dict(zip("TdnEK", SHAPE, strict=True))
    row = {"config": "small", **shape, "ours_torch": {"fwd_tflops": 90.4, "bwd_tflops": 80.6}}
    row |= {"deep_gemm": {"fwd_tflops": 70.2, "kept_MiB": 3.0}}
    row |= {"left_out": {"momoe": "RuntimeError: out of memory"}}
    record = {"rows": [row], "first_call": {"config": "small", "seconds": {"ours_torch": 0.01}}}
    states = {"ours_torch": "timed", "deep_gemm": "timed, forward only: no k", "momoe": "timed"}
    states |= {"scattermoe": "absent", "sonicmoe": "installed, but it does not fit: TypeError: f()"}
    record |= {
        "rivals": states,
        "device": "H200",
        "torch": "2",
        "date": "2026-11-21",
        "commit": "c",
    }
    text = layers.rivals(record)
    assert "| small | 90/81 | 70/- |" in text
    assert "Not timed: scattermoe (absent), sonicmoe (installed, but it does not fit)." in text
    assert "momoe on small: RuntimeError: out of memory." in text


def test_our_own_failure_ends_the_run(bench, rivals, monkeypatch):
    contenders, checker = bench

    def zeros(x, logits, w_up, w_down):
        return 0 * (x + (logits.sum() + w_up.sum() + w_down.sum()))

    monkeypatch.setitem(contenders.LAYERS, "ours_torch", lambda shape: zeros)
    found = rivals.availability(checker.data.shape)
    with pytest.raises(SystemExit, match="ours_torch: out is wrong"):
        rivals.first_calls(found, checker.data.shape, "cpu")


def test_a_rival_that_fails_on_one_layer_is_left_out_of_it(bench, deep_gemm, monkeypatch):
    import h200

    contenders, checker = bench
    layer = h200.Contenders.__new__(h200.Contenders)
    layer.data, layer.ours, layer.left_out = checker.data, {}, {}
    layers = {"ours_torch": contenders.torch_front_end(checker.data.shape, "cpu")}
    layers["deep_gemm"] = contenders.LAYERS["deep_gemm"](checker.data.shape)
    layer.rivals = {n: contenders.contender(checker.data, it) for n, it in layers.items()}

    def refuse(*_):
        raise AssertionError("k % 64 == 0")

    monkeypatch.setattr(layer.rivals["deep_gemm"], "layer", refuse)
    layer.check()
    assert layer.rivals.keys() == {"ours_torch"}
    assert layer.left_out == {"deep_gemm": "AssertionError: k % 64 == 0"}
    assert {name for name, _ in layer.runs(("fwd", "bwd"))} == {"ours_torch"}


@pytest.mark.parametrize("script", ["h200", "h200_extra", "rivals"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--library", __file__, "--configs", "7B"], 'configs has "7B", must be of: '),
        (["--library", "missing.so"], 'library is "missing.so", must be a file'),
        (["--library", __file__], "torch sees no usable CUDA device here"),
    ],
    ids=["config", "library", "device"],
)
def test_where_nothing_can_be_measured(bench, monkeypatch, capsys, script, arguments, sentence):
    what = ["kernels"] if script == "h200_extra" else []
    monkeypatch.setattr(sys, "argv", [script, *what, *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_small_work_is_timed_with_the_host_ahead(bench, monkeypatch):
    from h200_bench import timing

    now = [0.0]  # seconds
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "elapsed", lambda calls, run: 0.5)  # milliseconds of a flush

    def call():
        now[0] += 2e-3

    assert 0.5 * timing.lead_over(call, None) > 1.5 * 2.0


@pytest.mark.parametrize(("first", "later", "ends"), [(64, 0, False), (64, 8, True)])
def test_memory_that_nobody_lent_is_found(bench, monkeypatch, first, later, ends):
    import h200_extra

    taken = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 - sum(taken), 1000))

    def call():
        taken.append(later if taken else first)  # the first call loads its kernels

    if not ends:
        return h200_extra.check_allocates_nothing(call)
    with pytest.raises(SystemExit, match="took 8 bytes"):
        h200_extra.check_allocates_nothing(call)


def test_kernels_are_timed_by_role(bench, monkeypatch):
    from h200_bench import capi, kernels, timing

    launched = []

    def kernel(name, microseconds):
        return lambda: launched.append((name, microseconds))

    def traced(bursts):
        parts = []
        for calls, run in bursts:
            parts.append([])
            for call in range(calls):
                launched.clear()
                run()
                # The first of three calls does not count: it would change the median.
                factor = (100, 0.5, 1.5)[call]
                parts[-1] += [(name, factor * us) for name, us in launched]
        return parts

    def gemms(*times):
        return 1, capi.in_turn(*(kernel("gemm", us) for us in times))

    rest = kernel("route", 0.5)
    ours = types.SimpleNamespace(
        forward=capi.in_turn(
            rest, kernel("up_SwiGLU", 5), kernel("down", 3), kernel("sum_rows", 1)
        ),
        backward=capi.in_turn(
            kernel("hidden_grad", 4), kernel("down", 6), kernel("weight_grad", 9),
            kernel("sum_rows", 2), kernel("weight_grad", 9), rest,
        ),
        layer_backward=types.SimpleNamespace(
            without_dx=capi.in_turn(kernel("hidden_grad", 4), rest, kernel("weight_grad", 7))
        ),
    )  # fmt: skip
    products = types.SimpleNamespace(
        calls=lambda: {
            "A": gemms(10), "Y": gemms(11), "dH": gemms(12), "dX~": gemms(13), "dW": gemms(14, 15)
        },
        copy=lambda: kernel("copy", 16),
    )  # fmt: skip
    monkeypatch.setattr(kernels, "traced", traced)
    monkeypatch.setattr(timing, "elapsed", lambda calls, run: 20.0)
    assert kernels.kernel_times(ours, products, 60.0) == {
        **{("ours", "A"): 5, ("ours", "Y"): 3, ("ours", "O"): 1, ("ours", "rest of fwd"): 0.5},
        **{("ours", "dH"): 4, ("ours", "dX~"): 6, ("ours", "dX"): 2, ("ours", "rest of bwd"): 0.5},
        ("ours", "dW"): 7,
        **{("torch", "A"): 10, ("torch", "Y"): 11, ("torch", "O"): 16},
        **{("torch", "dH"): 12, ("torch", "dX~"): 13, ("torch", "dW"): 29},
    }
    with pytest.raises(SystemExit, match="the calls differ"):
        kernels.by_role(lambda part: ["A"] * len(part), [("up", 1.0)] * 4, 3, 1)


@pytest.mark.parametrize("which", range(5))
def test_one_wrong_result_is_rejected(bench, which):
    contenders, checker = bench
    layer = contenders.torch_front_end(checker.data.shape, "cpu")
    out, grads = contenders.contender(checker.data, layer).results()
    results = [t.detach().clone() for t in (out, *grads)]
    rows = results[which].view(-1, results[which].shape[-1])
    rows[: rows.shape[0] // 2] = rows[: rows.shape[0] // 2].flip(0)
    with pytest.raises(SystemExit, match="wrong"):
        checker.check_autograd("layer", results[0], results[1:])

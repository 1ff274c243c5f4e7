"""The trace of a step of examples/finetune.py: which part of the model a kernel belongs to."""

import demo_support  # noqa: F401 (finds the examples)
import pytest
import torch
from cuda_support import needs_cuda
from torch import nn

for package in ("transformers", "accelerate", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed")
from lm.errors import UserError  # noqa: E402
from tune import model, settings, trace  # noqa: E402

MAIN, AUTOGRAD = 1, 2


class Events(list):
    """A Chrome trace in which each kernel takes 1 ms."""

    def span(self, name, begin, end, tid=MAIN, category="user_annotation", **args):
        event = {"name": name, "ts": begin, "dur": end - begin, "tid": tid, "cat": category}
        self.append(event | {"args": {key.replace("_", " "): v for key, v in args.items()}})

    def launch(self, at, runs_at, tid=MAIN, name="gemm"):
        number = len(self)
        self.span("cudaLaunchKernel", at, at + 1, tid, "cuda_runtime", correlation=number)
        self.span(name, runs_at, runs_at + 1000, 7, "kernel", correlation=number)


def forward_of_a_norm_in_a_layer(events):
    events.span(trace.STEP, 0, 1000)
    events.span("part: attention", 10, 100)
    events.span("part: norms", 20, 40)
    events.span("aten::pow", 21, 24, category="cpu_op", Sequence_number=5, Fwd_thread_id=0)
    events.launch(22, 0)
    events.span("aten::mm", 50, 60, category="cpu_op", Sequence_number=6, Fwd_thread_id=0)
    events.launch(52, 1000)


def test_kernels_belong_to_the_innermost_part():
    events = Events()
    forward_of_a_norm_in_a_layer(events)
    events.launch(200, 2000)
    events.span("Optimizer.step#AdamW.step", 300, 400)
    events.launch(310, 2500)  # overlaps the one before
    found = trace.attribute(events)
    assert found["parts"] == {
        name: {"forward": 1.0} for name in ("norms", "attention", "other", "optimizer")
    }
    assert found["kernels"] == 4 and found["busy_ms"] == 3.5
    assert found["longest"] == {"gemm": [4.0, 4]}


def test_backward_is_found_by_the_node_and_recomputation_by_the_part_inside_of_it():
    events = Events()
    forward_of_a_norm_in_a_layer(events)
    begin, thread = trace.NODE + "PowBackward0", {"tid": AUTOGRAD, "category": "cpu_op"}
    events.span(begin, 500, 600, **thread, Sequence_number=5, Fwd_thread_id=1)
    events.span("part: experts", 510, 550, AUTOGRAD)
    # An operator of the recomputation has the number of another thread's node.
    events.span("aten::mul", 515, 518, **thread, Sequence_number=5, Fwd_thread_id=0)
    events.launch(516, 3000, AUTOGRAD)
    events.launch(560, 4000, AUTOGRAD)
    events.launch(700, 5000, AUTOGRAD)
    parts = trace.attribute(events)["parts"]
    assert parts["norms"] == {"forward": 1.0, "backward": 1.0}
    assert parts["experts"] == {"recomputed": 1.0}
    assert parts["other"] == {"forward": 1.0}
    text = trace.table(trace.attribute(events), 10.0)
    assert "5 kernels, busy 5.0 ms of a step of 10.0 ms, idle 5.0 ms" in text


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("model.layers.0.mlp.experts", "experts"),
        ("model.layers.0.mlp.experts.base_layer", None),
        ("model.layers.0.mlp.gate", "router"),
        ("model.layers.0.self_attn", "attention"),
        ("model.layers.0.self_attn.q_norm", "norms"),
        ("model.layers.0.self_attn.q_proj", "attention's linear layers"),
        ("model.layers.0.mlp.gate_proj", None),
        ("lm_head", "head and loss"),
    ],
)
def test_parts_are_known_by_the_names_of_transformers(path, part):
    assert trace.part_of(path, nn.Identity()) == part


def test_steps_must_be_enough():
    with pytest.raises(UserError, match="steps is 3; with --trace it must be at least 4"):
        settings.parse(["--config", "small", "--trace", "--steps", "3"])


def gradients(compiled):
    """Of all factors, in fp32; B is not 0."""
    s = settings.parse(["--config", "small", "--device", "cpu", "--rank", "4"])
    net = model.add_factors(model.build(s), s).train()
    torch.manual_seed(1)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    if compiled:
        model.compile_parts(net)
        own = {p.rpartition(".")[2] for p, m in net.named_modules() if m._compiled_call_impl}
        norms = {"norm", "input_layernorm", "post_attention_layernorm"}
        assert own == {"self_attn", "gate"} | norms
    net.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(3))
    net(input_ids=ids, labels=ids).loss.backward()
    return [p.grad for p in net.parameters() if p.requires_grad]


def test_compiled_parts_change_no_gradient(monkeypatch):
    compile_of = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda m, **given: compile_of(m, backend="aot_eager", **given)
    )
    for got, want in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_evaluations_compile_no_part_and_leave_others_compiled(monkeypatch):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    compile_of = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda m, **given: compile_of(m, backend=backend, **given)
    )
    s = settings.parse(["--config", "small", "--device", "cpu", "--rank", "4", "--layers", "1"])
    net = model.add_factors(model.build(s), s).train()
    model.compile_parts(net)
    ids = torch.zeros(1, 16, dtype=torch.long)
    with model.uncompiled(net), torch.no_grad():
        want = net(input_ids=ids).logits
        assert not compiled
        torch.compile(torch.neg, backend=backend)(want)  # as transformers compiles flex attention
        assert len(compiled) == 1
    torch.testing.assert_close(net(input_ids=ids).logits, want)
    assert len(compiled) > 1


@needs_cuda
@pytest.mark.parametrize("more", ([], ["--compile"]))
def test_a_step_is_traced_on_cuda(tmp_path, capsys, more):
    from finetune import main

    given = ["--config", "small", "--sequence", "256", "--steps", "4", "--save-every", "0"]
    assert main([*given, "--trace", "--out", str(tmp_path), *more]) == 0
    text = capsys.readouterr().out
    for part in ("experts", "attention", "norms", "router", "optimizer", "head and loss"):
        assert f"\n  {part}" in text
    torch.cuda.synchronize()

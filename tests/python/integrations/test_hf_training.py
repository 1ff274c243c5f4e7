"""transformers' own ways to train, with experts of this library: Trainer, PEFT under it, and its
expert parallelism."""

import os

import pytest
import torch
import torch.multiprocessing as multiprocessing
from reference import error
from sonicmoe_cpp.integrations import hf
from worlds import free_port, leave

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import hf_models  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments  # noqa: E402

hf.register()
IDS = torch.randint(96, (8, 11), generator=torch.Generator().manual_seed(7))


class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def train(model, folder, resume=None, **options):
    """Losses of six steps of Trainer, of two micro-batches each."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    arguments = TrainingArguments(
        folder,
        **{
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
        }
        | options,
    )
    seen = Losses()
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[seen])
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return torch.tensor(seen.losses)


def compare(build, folder, **options):
    """The same run with our experts and with eager ones: losses, and the trained parameters."""
    runs = []
    for implementation in ("sonicmoe_cpp", "eager"):
        model = build()
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.set_experts_implementation(implementation)
        losses = train(model, folder, **options)
        runs.append((losses, {n: p for n, p in model.named_parameters() if p.requires_grad}))
    (losses, ours), (wanted, theirs) = runs
    assert len(wanted) == 6 and wanted[-1] < 0.9 * wanted[0]
    torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=1e-3)
    assert ours.keys() == theirs.keys()
    return losses, ours, theirs


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_trainer(architecture, tmp_path):
    _, ours, theirs = compare(lambda: hf_models.build(architecture), tmp_path)
    for name, value in ours.items():
        assert error(value, theirs[name]) < 2e-3, name


def test_checkpointing_computes_the_same_bits_again(tmp_path):
    runs = [
        train(hf_models.build("qwen3_moe"), tmp_path, gradient_checkpointing=again)
        for again in (False, True)
    ]
    assert torch.equal(*runs)


def test_trainer_in_bf16(tmp_path):
    """In bf16 by autocast. Each step rounds, so only the first steps are compared."""
    build = hf_models.build
    exact = train(build("qwen3_moe"), tmp_path)
    rounded = train(build("qwen3_moe"), tmp_path, bf16=True)
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded[:2], exact[:2], rtol=1e-2, atol=1e-2)
    assert rounded[-1] < 0.9 * rounded[0]


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_peft_under_trainer(architecture, tmp_path):
    """PEFT's factors on expert parameters; all else is frozen."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    targets = ["experts.gate_up_proj", "experts.down_proj"]

    def build():
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=targets)
        return peft.get_peft_model(hf_models.build(architecture), config)

    _, ours, theirs = compare(build, tmp_path, learning_rate=5e-2)
    assert all("lora_" in name for name in ours)
    assert any(value.abs().max() > 0 for name, value in ours.items() if "lora_B" in name)
    for name, value in ours.items():
        assert error(value, theirs[name]) < 5e-3, name


def lora_run(architecture, folder, resume=None, **options):
    """(losses, factors) of a run of Trainer on the factors of experts and of one projection."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    model = hf_models.build(architecture)
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model = hf.add_lora(theirs, 4, 8.0)
    options = {"learning_rate": 5e-2, "save_strategy": "steps", "save_steps": 3} | options
    losses = train(model, folder, resume, **options)
    return losses, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_a_run_on_factors_is_resumed(architecture, tmp_path):
    """With the optimizer's state the run goes on as if uninterrupted; without it factors are the
    saved ones too, and all of them are trained."""
    losses, want = lora_run(architecture, tmp_path)
    checkpoint = tmp_path / "checkpoint-3"
    again, got = lora_run(architecture, tmp_path, checkpoint)
    torch.testing.assert_close(again, losses[3:])
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=name)
    saved = load_file(checkpoint / "adapter_model.safetensors")
    (checkpoint / "optimizer.pt").unlink()
    options = {"learning_rate": 1e-6, "max_steps": 4, "save_strategy": "no"}
    _, close = lora_run(architecture, tmp_path, checkpoint, **options)
    assert len(saved) == len(close) == 12
    for name, value in close.items():
        first = saved[name.replace(".default", "")]
        assert 0 < (value - first).abs().max() < 1e-5, name


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_the_best_factors_are_loaded_at_the_end(architecture, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 3}
    options |= {"load_best_model_at_end": True, "greater_is_better": True}  # so the first is best
    _, got = lora_run(architecture, tmp_path, **options)
    saved = load_file(tmp_path / "checkpoint-1" / "adapter_model.safetensors")
    for name, value in got.items():
        assert torch.equal(value, saved[name.replace(".default", "")]), name


# ---- expert parallelism --------------------------------------------------------------------------

EP_MODELS = ("qwen3_moe", "deepseek_v3", "gpt_oss")
EP = ("all_reduce", "all_to_all")


def gradients(model):
    out = model(IDS[:2], labels=IDS[:2])
    out.loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return {"logits": out.logits.detach()} | grads


def expert_parallel_worker(rank, port, folder, results):
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo")
    hf.register()
    for architecture in EP_MODELS:
        whole = AutoModelForCausalLM.from_pretrained(f"{folder}/{architecture}")
        whole.set_experts_implementation("eager")
        want = gradients(whole)
        for implementation in EP:
            model = AutoModelForCausalLM.from_pretrained(
                f"{folder}/{architecture}",
                experts_implementation="sonicmoe_cpp",
                distributed_config=DistributedConfig(
                    tp_size=2, ep_size=2, ep_implementation=implementation
                ),
            )
            _, experts = hf_models.experts_of(model)[0]
            local = experts.down_proj.to_local().shape[0], experts.down_proj.shape[0]
            got = gradients(model)
            errors = [error(got[name], value) for name, value in want.items()]
            served = bool(hf.supports(model))
            results.put((architecture, implementation, rank, local, served, errors))
    leave()


def test_expert_parallelism(tmp_path):
    """Each rank has half of the experts, by transformers' plan: logits and all gradients equal
    those of the whole model with eager experts."""
    needed = "transformers.distributed.expert_parallel"
    pytest.importorskip(needed, reason="this transformers has no such expert parallelism")
    for architecture in EP_MODELS:
        options = {"num_local_experts": 6} if architecture == "gpt_oss" else {}
        hf_models.build(architecture, **options).save_pretrained(tmp_path / architecture)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(expert_parallel_worker, (free_port(), str(tmp_path), results), nprocs=2)
    found = [results.get() for _ in range(2 * len(EP_MODELS) * len(EP))]
    assert {f[:3] for f in found} == {(a, i, r) for a in EP_MODELS for i in EP for r in (0, 1)}
    for *_, (local, whole), served, errors in found:
        assert served and 2 * local == whole
        assert all(e < 1e-5 for e in errors)

"""The command from outside: exit codes, --json documents and nothing else, sentences on stderr.

python tests/cli_test.py PATH_OF_SONICMOE
"""

import ctypes.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

COMMAND = ""
SMALL = ["--shape", "60,24,16,6,2"]
FP8 = ["--precision", "fp8"]
ROOT = Path(__file__).parent.parent
SHORT = {"forward": "fwd", "backward": "bwd"}
RECORDS = "benchmarks/results/h200"


def run(*arguments):
    if arguments[:1] in (("bench",), ("verify",)) and "--backend" not in arguments:
        arguments += ("--backend", "cpu")  # the default is a GPU where there is one
    if arguments[:1] == ("plan",) and "--device" not in arguments:
        arguments += ("--device", "h200")
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def on_terminal(term, *arguments):
    """What the command writes to stderr on a terminal of this kind."""
    ours, theirs = os.openpty()
    done = subprocess.run(
        [COMMAND, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=os.environ | {"TERM": term},
        check=True,
    )
    os.close(theirs)
    assert done.returncode == 0
    try:
        return os.read(ours, 1 << 16)
    except OSError:  # nothing was written
        return b""
    finally:
        os.close(ours)


class CliTest(unittest.TestCase):
    def document(self, *arguments):
        code, out, err = run(*arguments, "--json")
        self.assertEqual((code, err), (0, ""), arguments)
        document = json.loads(out)  # anything beside the one document would not parse
        self.assertEqual((document["version"], document["format"]), ("0.1.0", 1), arguments)
        return document

    def refused(self, sentence, *arguments):
        code, out, err = run(*arguments)
        self.assertEqual((code, out, err), (2, "", f"sonicmoe: {sentence}\n"))

    def test_info(self):
        info = self.document("info")
        self.assertGreaterEqual(info["cpu"]["threads"], 1)
        self.assertEqual(info["cuda"]["usable"], info["cuda"]["reason"] == "")
        self.assertEqual(info["cuda"]["built"], bool(info["cuda"]["archs"]))
        if not info["cuda"]["built"]:  # and why
            reason = r"this build has no CUDA backend: (SONICMOE_CUDA is OFF|no nvcc|nvidia-smi) ?"
            self.assertRegex(info["cuda"]["reason"], reason)
        self.assertNotIn("ordinal", info["cuda"]["reason"])
        if not ctypes.util.find_library("cuda"):
            self.assertNotIn("insufficient", info["cuda"]["reason"])
        self.assertEqual(run("--version"), (0, "sonicmoe 0.1.0\n", ""))
        self.assertIn("threads", run("info")[1])

    def test_engines(self):
        cuda = self.document("info")["cuda"]
        self.assertEqual(bool(cuda["engines"]), bool(cuda["archs"]))
        names = [engine["name"] for engine in cuda["engines"]]
        self.assertIn(cuda["engine"], [*names, None])
        for engine in cuda["engines"]:
            thresholds = [choice["name"] for choice in engine["choices"]]
            self.assertEqual(len(set(thresholds)), len(thresholds))
            known = {
                "hopper": ["dynamic depth"],
                "portable": ["narrow columns"],
                "blackwell": ["dynamic rows", "sum beside rows"],
            }[engine["name"]]
            self.assertEqual([name for name in thresholds if name in known], known)
            self.assertEqual(bool(thresholds), bool(known))
        listed = " ".join(names) or "none"
        self.refused(f'engine is "abacus", must be one of: {listed}', "info", "--engine", "abacus")
        for command in ("verify", "bench"):
            refusal = 'engine is "abacus", must be absent: the backend cpu has no engines'
            self.refused(refusal, command, "--engine", "abacus")
            if names:
                refusal = f'engine is "abacus", must be one of: {", ".join(names)}'
                self.refused(refusal, command, "--backend", "cuda", "--engine", "abacus")
        self.addCleanup(os.environ.pop, "SONICMOE_ENGINE", None)
        os.environ["SONICMOE_ENGINE"] = "abacus"
        if names:
            refusal = 'SONICMOE_ENGINE is "abacus", must be one of: '
            self.assertIn(refusal, self.document("info")["cuda"]["reason"])
        for name in names:
            asked = self.document("info", "--engine", name)["cuda"]
            self.assertIn(asked["engine"], (name, None))

    def test_plan(self):
        plan = self.document("plan", "--shape", "24576,1536,256,128,8", "--backend", "cpu")
        self.assertEqual(
            [k["name"] for k in plan["kernels"]], ["A", "Y", "O", "dH", "dW2", "dX~", "dW1", "dX"]
        )
        self.assertEqual(plan["kept_bytes"]["ours_h"], 192 << 20)
        self.assertEqual({g["kept_bytes"]["ours_h"] for g in plan["granularity"]}, {192 << 20})
        # A, Y and metadata of forward; dH, A' and dX~ of backward, at least.
        rows, element = 24576 * 8, 2
        workspace = plan["workspace_bytes"]
        self.assertGreaterEqual(workspace["backward"], rows * (3 * 256 + 1536) * element)
        self.assertGreaterEqual(workspace["inference"], workspace["forward"])
        same = self.document("plan", "--config", "7B-n256", "--device", "b200")
        self.assertEqual(same["shape"], plan["shape"])
        self.assertLess(same["forward"]["us"], plan["forward"]["us"])
        # The workspace is that of the device's backend; unknown where this build has no CUDA.
        self.assertEqual(same["backend"], "cuda")
        if not self.document("info")["cuda"]["archs"]:
            self.assertIsNone(same["workspace_bytes"])
            unknown = "workspace during a call (cuda): not known, this build has no kernels for"
            self.assertIn(unknown, run("plan", *SMALL)[1])
            code, _, err = run("plan", *SMALL, "--backend", "cuda")
            self.assertEqual(code, 2)
            refusal = "backend is cuda, must be cpu: this build has no cuda backend ("
            self.assertIn(refusal, err)
        here = self.document("plan", *SMALL, "--device", "cpu", "--dtype", "f32")
        self.assertEqual(here["backend"], "cpu")
        self.assertGreater(here["workspace_bytes"]["forward"], 0)
        self.assertGreater(here["device"]["flops_per_second"], 1e8)
        code, out, _ = run("plan", "--config", "olmoe")
        self.assertEqual(code, 0)
        self.assertIn("ScatterMoE style", out)

    def test_precision(self):
        shape = ("--shape", "24576,1536,256,128,8")
        bf16, fp8 = (
            self.document("plan", *shape, "--backend", "cpu", "--precision", precision)
            for precision in ("tensors", "fp8")
        )
        self.assertEqual((bf16["precision"], fp8["precision"]), ("tensors", "fp8"))
        self.assertEqual(bf16["kept_bytes"]["fp8_weights"], 0)
        self.assertGreater(fp8["kept_bytes"]["fp8_weights"], 6 * 128 * 256 * 1536)
        self.assertLess(fp8["kept_bytes"]["ours_h"], 0.55 * bf16["kept_bytes"]["ours_h"])
        self.assertLess(fp8["forward"]["us"], bf16["forward"]["us"])
        self.assertIsNone(fp8["forward"]["sustained_us"])
        self.assertTrue(all(g["n"] % 64 == 0 for g in fp8["granularity"]))
        text = run("plan", *shape, "--backend", "cpu", "--precision", "fp8")[1]
        self.assertIn("A, Y, dH and dX~ in fp8 at 1.5 times the rate of bf16, as measured", text)
        auto = ("--device", "cpu", "--precision", "auto")
        self.assertEqual(self.document("plan", *SMALL, *auto)["precision"], "tensors")
        small = ("--shape", "70,256,128,4,2", "--repeats", "1")
        for precision in ("tensors", "fp8"):
            bench = self.document("bench", *small, "--precision", precision)
            self.assertTrue(bench["check"]["passed"])
            self.assertEqual(bench["precision"], precision)
            self.assertEqual(bench["quantise_ms"] is None, precision == "tensors")
        cases = ("--filter", "swiglu_bias", "--no-negative", "--precision", "fp8")
        names = [c["name"] for c in self.document("verify", *cases)["cases"]]
        self.assertEqual(names, ["fp8/activation/swiglu_bias/random"])
        for arguments, sentence in (
            (("plan", *shape, "--precision", "fp4"), 'precision is "fp4", must be one of: tensors'),
            (
                ("plan", *shape, "--precision", "fp8", "--dtype", "f16"),
                "dtype is f16, must be bf16 for fp8",
            ),
            (
                ("bench", *SMALL, "--precision", "fp8"),
                "hidden is 24, must be a multiple of 64 for fp8",
            ),
        ):
            code, out, err = run(*arguments)
            self.assertEqual((code, out), (2, ""))
            self.assertIn(sentence, err)

    def test_plan_of_a_finetune(self):
        """The sizes of a config.json are those of the named model; memory in another format."""
        config = {"num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936}
        config |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        config |= {"num_experts": 128, "num_experts_per_tok": 8, "intermediate_size": 6144}
        config |= {"moe_intermediate_size": 768, "tie_word_embeddings": False}
        plan = ("plan", "--device", "rtx-4090", "--finetune")
        named = self.document(*plan, "qwen3-30b")
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "config.json")
            for content in (config, {"text_config": config}):
                with open(file, "w") as out:
                    json.dump(content, out)
                self.assertEqual(named | {"model": file}, self.document(*plan, file))
            del config["vocab_size"]
            with open(file, "w") as out:
                json.dump(config, out)
            sentence = f"model is {file}, which has no positive integer vocab_size"
            self.refused(sentence, *plan, file)
            none = os.path.join(folder, "none.json")
            self.refused(f"model is {none}, must be a JSON file with sizes", *plan, none)
        self.assertEqual(named["memory_bytes"]["experts"], 48 * 128 * 3 * 768 * 2048 * 2)
        self.assertFalse(named["fits"])
        options = ("--weights", "nf4-nested", "--factors", "bf16", "--optimizer", "adamw-8bit")
        packed = self.document(*plan, "qwen3-30b", *options)
        self.assertTrue(packed["fits"])
        self.assertGreater(packed["step_roofline_ms"]["unpacking"], 0)
        text = run(*plan, "qwen3-30b", *options)[1]
        for part in (
            "643 million parameters",
            "a model, not a measurement",
            "it fits",
            "times as long",
        ):
            self.assertIn(part, text)
        for sentence, more in (
            ('factors is "f16", must be one of: fp32, bf16', ("olmoe", "--factors", "f16")),
            (
                'optimizer is "lion", must be one of: adamw, adamw-8bit, adafactor',
                ("olmoe", "--optimizer", "lion"),
            ),
            ("rank is 0, must be at least 1", ("olmoe", "--rank", "0")),
            ("logits is 0, must be at least 1", ("olmoe", "--logits", "0")),
            ("unpack-mib is -1, must be at least 0", ("olmoe", "--unpack-mib", "-1")),
            ('dense is "int8", must be one of: bf16, nf4', ("olmoe", "--dense", "int8")),
            ("finetune is given, so config and shape must be absent", ("olmoe", *SMALL)),
            (
                'finetune is given, so backend must be absent, is "cuda"',
                ("olmoe", "--backend", "cuda"),
            ),
        ):
            self.refused(sentence, *plan, *more)
        sentence = (
            "finetune is absent, so sequence, batch, rank, weights, factors, optimizer, dense, "
            "unpack-mib, logits, offload-embedding and no-checkpointing must be absent"
        )
        for more in (("--rank", "8"), ("--no-checkpointing",)):
            self.refused(sentence, "plan", *more)

    def test_plan_says_what_was_measured(self):
        def plan(*arguments):
            return self.document("plan", "--config", "olmoe", *arguments)

        evidence = {
            "h200": ("hopper", "measured"),
            "h100": ("hopper", "run"),
            "h100-pcie": ("hopper", "estimated"),
            "b200": ("portable", "estimated"),
            "a100": ("portable", "estimated"),
            "rtx-5090": ("portable", "estimated"),
        }
        for device, (engine, known) in evidence.items():
            document = plan("--device", device)
            self.assertEqual(document["engine"]["name"], engine, device)
            self.assertEqual(document["engine"]["evidence"], known, device)
            self.assertGreater(document["device"]["memory_bytes"], 2**34)
            # A time under load is claimed only where the engine was timed.
            sustained = document["backward"]["sustained_us"]
            self.assertEqual(sustained is None, known == "estimated", device)
            text = run("plan", "--config", "olmoe", "--device", device)[1]
            self.assertEqual("an estimate" in text, known == "estimated", device)
            self.assertEqual("sustained" in text, known != "estimated", device)
        # The instruction alone is slower on Hopper; the plan of the other engine says so.
        h200, portable = plan(), plan("--engine", "portable")
        self.assertEqual(portable["engine"]["evidence"], "measured")
        shares = [p["backward"]["us"] / p["backward"]["sustained_us"] for p in (h200, portable)]
        self.assertGreater(shares[0], shares[1])
        self.assertAlmostEqual(portable["device"]["flops_per_second"], 632e12, delta=1)
        self.assertGreater(portable["backward"]["us"], h200["backward"]["us"])
        self.assertEqual([k.get("tile") for k in portable["kernels"]], [None] * 8)
        self.assertIsNone(plan("--device", "cpu", "--dtype", "f32")["device"]["memory_bytes"])

    def test_the_devices_in_the_docs(self):
        page = (ROOT / "docs/command.md").read_text()
        table = page.split("### Devices of plan")[1].split("\n\n| ")[1].split("\n\n")[0]
        rows = [[c.strip() for c in row.strip("| ").split("|")] for row in table.splitlines()[2:]]
        names = run("plan", *SMALL, "--device", "tpu")[2].split("one of: ")[1].strip().split(", ")
        self.assertEqual([row[0].strip("`") for row in rows], names[:-1])
        for name, capability, tflops, gbytes, gib, engine, source in rows:
            device = name.strip("`")
            document = self.document("plan", *SMALL, "--device", device)
            said = document["device"]
            self.assertAlmostEqual(
                float(tflops) * 1e12, said["flops_per_second"], delta=1, msg=device
            )
            self.assertAlmostEqual(
                float(gbytes) * 1e9, said["bytes_per_second"], delta=1, msg=device
            )
            self.assertEqual(int(gib) << 30, said["memory_bytes"], device)
            self.assertEqual(engine, document["engine"]["name"], device)
            self.assertIn(source.split(",")[0], said["source"], device)
            self.assertEqual(capability, document["device"]["compute_capability"], device)

    def test_plan_has_the_rates_of_the_records(self):
        """The H200's shares of the roofline (docs/command.md), and the speed of fp8 over bf16."""

        def rows(record):
            for row in json.loads((ROOT / f"{RECORDS}/{record}.json").read_text())["rows"]:
                shape = ("plan", "--shape", ",".join(str(row[c]) for c in "TdnEK"))
                yield row, lambda *more, shape=shape: self.document(*shape, *more)

        page = " ".join((ROOT / "docs/command.md").read_text().split())
        both = ("forward", "backward")
        for record, column, engine, passes in (
            ("hot", "ours_cpp", "hopper", [("forward",), ("backward",)]),
            ("portable", "portable", "portable", [both]),
        ):
            shares = []
            for row, plan in rows(record):
                if row["T"] < 16384:
                    continue
                planned = plan("--engine", engine)
                for names in passes:
                    roofline = sum(planned[name]["us"] for name in names)
                    measured = sum(row[column][f"{SHORT[name]}_ms"] for name in names)
                    shares.append(roofline / measured / 1e3)
            self.assertEqual(len(shares), 18 * len(passes))
            mean = planned["forward"]["us"] / planned["forward"]["sustained_us"]
            self.assertAlmostEqual(mean, statistics.mean(shares), delta=0.005)
            told = f"{min(shares):.2f} to {max(shares):.2f} of"
            self.assertIn(f"The `{engine}` engine reached {told}", page)
            self.assertIn(f", {mean:.2f} in the mean", page)
        for row, plan in rows("fp8"):
            if row["d"] < 2048 or row["n"] < 1024:
                continue
            planned = [sum(p[name]["us"] for name in both) for p in (plan(), plan(*FP8))]
            measured = [row[c]["fwd_ms"] + row[c]["bwd_ms"] for c in ("bf16", "fp8")]
            ratio = planned[0] / planned[1] * measured[1] / measured[0]
            self.assertAlmostEqual(ratio, 1, delta=0.03, msg=row["config"])

    def test_route(self):
        routed = self.document("route", "--shape", "1000,8,8,16,4", "--tile", "32", "--skew", "1")
        methods = {m["method"]: m for m in routed["methods"]}
        self.assertEqual(
            list(methods), ["topk", "nearest", "up", "down", "score", "stochastic", "balanced"]
        )
        self.assertEqual(methods["topk"]["rows"], 4000)
        self.assertGreater(methods["topk"]["padding"], 0)
        self.assertEqual(methods["nearest"]["padding"], 0)
        self.assertLessEqual(methods["down"]["rows"], 4000)
        self.assertGreaterEqual(methods["up"]["rows"], 4000)
        again = self.document("route", "--shape", "1000,8,8,16,4", "--tile", "32", "--skew", "1")
        self.assertEqual(routed, again)

    def test_bench(self):
        for routing in ("topk", "rounded", "skewed"):
            bench = self.document("bench", *SMALL, "--routing", routing, "--repeats", "3")
            self.assertTrue(bench["check"]["passed"])
            # The peak is sampled between the runs, so that one short load cannot lower it.
            self.assertEqual(bench["machine"]["samples"], 4)
            self.assertIn("best of 4 samples between the runs", bench["machine"]["source"])
            self.assertTrue(0 < bench["machine"]["steadiness"] <= 1)
            self.assertTrue(bench["rows"] == 120 or routing == "rounded")
            self.assertEqual([p["pass"] for p in bench["passes"]], ["forward", "backward", "both"])
            for measured in bench["passes"]:
                self.assertGreater(measured["median_ms"], 0)
                # Rounding to tiles of 128 may leave nothing of so few rows.
                self.assertEqual(measured["gflops"] > 0, bench["rows"] > 0)
                self.assertLess(measured["share_of_roofline"], 1.05)
        for dtype in ("f32", "f16", "f64"):
            bench = self.document(
                "bench",
                *SMALL,
                "--dtype",
                dtype,
                "--activation",
                "relu2",
                "--pass",
                "fwd",
                "--repeats",
                "1",
                "--threads",
                "1",
            )
            self.assertEqual([p["pass"] for p in bench["passes"]], ["forward"])

    def test_bench_kernels(self):
        bench = self.document("bench", *SMALL, "--kernels", "--repeats", "3")
        kernels = {k["name"]: k for k in bench["kernels"]}
        # Every kernel of the method, in the order of execution, and what the model has no cost of.
        self.assertEqual(
            list(kernels),
            ["metadata", "A", "Y", "O", "dH", "dW2", "dW1", "biases", "dX~", "dX"],
        )
        for name, kernel in kernels.items():
            self.assertGreater(kernel["median_us"], 0)
            modelled = name not in ("metadata", "biases")
            self.assertEqual("share_of_roofline" in kernel, modelled)
        forward = next(p for p in bench["passes"] if p["pass"] == "forward")
        parts = sum(kernels[name]["median_us"] for name in ("metadata", "A", "Y", "O"))
        self.assertLess(parts, 3e3 * forward["median_ms"])
        only = self.document("bench", *SMALL, "--kernels", "--pass", "fwd", "--repeats", "1")
        self.assertEqual([k["name"] for k in only["kernels"]], ["metadata", "A", "Y", "O"])

    def test_verify(self):
        verified = self.document("verify", "--filter", "silu", "--no-negative")
        self.assertTrue(verified["passed"])
        self.assertTrue(verified["cases"])
        for case in verified["cases"]:
            self.assertLessEqual(case["worst_ratio"], 1, case["name"])

    def test_output_that_cannot_be_written(self):
        for arguments in (["info"], ["plan", *SMALL, "--json"], ["--help"], ["--version"]):
            with open("/dev/full", "w") as full:
                done = subprocess.run(
                    [COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True
                )
            said = "sonicmoe: stdout cannot be written: No space left on device\n"
            self.assertEqual((done.returncode, done.stderr), (2, said), arguments)
            # A pipe that nobody reads, where SIGPIPE is ignored and where it is not.
            for ignored in (True, False):
                read, write = os.pipe()
                os.close(read)
                done = subprocess.run(
                    [COMMAND, *arguments],
                    stdout=write,
                    stderr=subprocess.PIPE,
                    restore_signals=not ignored,
                )
                os.close(write)
                self.assertEqual(done.returncode, 2 if ignored else -signal.SIGPIPE, arguments)

    def test_progress_has_control_characters_only_on_terminals_that_have_them(self):
        self.assertIn(b"\033[K", on_terminal("xterm", "route", *SMALL))
        self.assertEqual(on_terminal("dumb", "route", *SMALL), b"")

    def test_impossible_and_too_large_shapes(self):
        huge = "4611686018427387904,512,256,64,4"
        for command in ("plan", "bench", "route"):
            code, out, err = run(command, "--shape", huge)
            self.assertEqual((code, out), (2, ""))
            self.assertIn("tokens is 4611686018427387904, must be below 2^31", err)
        code, _, err = run("route", "--shape", "1000000000,8,8,1000,2")
        self.assertEqual(code, 2)
        self.assertRegex(err, "^sonicmoe: shape needs about .* of memory, must fit in the ")
        # Wider granularities than any layer has are left out.
        many = self.document("plan", "--shape", "1,8,8,2147483647,1", "--backend", "cpu")
        self.assertTrue(all(row["E"] < 2**31 for row in many["granularity"]))

    def test_plan_refuses_what_a_gpu_does(self):
        for shape, more, sentence in (
            ("128,100,64,8,2", (), "hidden is 100, must be a multiple of 8 on a GPU"),
            ("128,64,60,8,2", (), "width is 60, must be a multiple of 8 on a GPU"),
            ("128,64,64,2048,2", (), "experts is 2048, must be at most 1024 on a GPU"),
            (
                "128,64,64,8,2",
                ("--dtype", "f32"),
                "dtype is f32, must be bf16 or f16 on a GPU "
                "(--device cpu plans for this machine's CPU)",
            ),
        ):
            self.refused(sentence, "plan", "--shape", shape, *more)
            self.document("plan", "--shape", shape, *more, "--device", "cpu")

    def test_plan_names_the_device_that_it_chose(self):
        command = [COMMAND, "plan", *SMALL]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.assertEqual("the default where no GPU" in out, "roofline of h200 (" in out)
        self.assertNotIn("the default", run("plan", *SMALL)[1])

    def test_the_default_backend_is_the_gpu_if_it_can_be_used(self):
        cuda = self.document("info")["cuda"]
        command = [COMMAND, "bench", *SMALL, "--repeats", "1", "--json"]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.assertEqual(json.loads(out)["backend"], "cuda" if cuda["usable"] else "cpu")
        if cuda["archs"] and not ctypes.util.find_library("cuda"):
            refusal = "no NVIDIA driver found (libcuda.so.1)"
            self.refused(refusal, "verify", "--backend", "cuda")

    def test_bench_checks_a_layer_of_one_token(self):
        for dtype in ("f64", "f32", "bf16"):
            for shape in ("1,8,8,1,1", "3,1,1,2,1", "0,8,8,2,1"):
                bench = self.document("bench", "--shape", shape, "--dtype", dtype, "--repeats", "1")
                self.assertTrue(bench["check"]["passed"], (shape, dtype, bench["check"]))

    def test_verify_lists_its_cases(self):
        listed = self.document("verify", "--list")
        every = listed["cases"]
        self.assertEqual(run("verify", "--list")[1].splitlines(), every)
        some = self.document("verify", "--list", "--filter", "silu", "--precision", "tensors")
        ran = self.document("verify", "--filter", "silu", "--precision", "tensors", "--no-negative")
        self.assertEqual(some["cases"], [case["name"] for case in ran["cases"]])
        self.assertLess(set(some["cases"]), set(every))
        # The pages that say how many broken implementations there are.
        broken = listed["broken_implementations"]
        self.assertEqual(len(broken), len(set(broken)))
        readme = (ROOT / "README.md").read_text()
        self.assertEqual(re.findall(r"(\d+) kinds of broken impl", readme), [str(len(broken))])
        testing = (ROOT / "docs/testing.md").read_text()
        ways = re.findall(r"breaks a correct implementation in (\d+) ways", testing)
        self.assertEqual(ways, [str(len(broken))])

    def test_list(self):
        for command in ("plan", "bench", "route"):
            configs = {c["name"]: c["shape"] for c in self.document(command, "--list")["configs"]}
            self.assertEqual(configs["laptop"], {"T": 4096, "d": 512, "n": 256, "E": 64, "K": 8})
            code, out, _ = run(command, "--list")
            self.assertEqual((code, out.count("\n")), (0, len(configs)))
            self.assertEqual(configs["olmoe"], self.document("plan", "--config", "olmoe")["shape"])

    def test_help_has_the_exit_codes(self):
        for arguments in ([], ["bench"], ["plan"]):
            code, out, err = run(*arguments, "--help")
            self.assertEqual((code, err), (0, ""))
            self.assertIn("Exit codes: 0 done; 1 a check against the oracle failed; 2", out)

    def test_refusals(self):
        self.refused(
            'command is "train", must be one of: info, verify, bench, plan, route', "train"
        )
        self.refused("command is missing, must be one of: info, verify, bench, plan, route")
        self.refused("shape is missing, must be --shape T,d,n,E,K or --config NAME", "plan")
        self.refused(
            'shape is "1,2", must be T,d,n,E,K: five integers and commas', "plan", "--shape", "1,2"
        )
        self.refused(
            "config and shape are both given, must be one of them",
            "plan",
            *SMALL,
            "--config",
            "olmoe",
        )
        self.refused("top_k is 9, must be at most E = 4", "route", "--shape", "8,8,8,4,9")
        self.refused("hidden is 0, must be at least 1", "bench", "--shape", "8,0,8,4,2")
        self.refused("tile is 0, must be at least 1", "route", *SMALL, "--tile", "0")
        most = "tile is 9223372036854775807, must be below 2^31"
        self.refused(most, "route", *SMALL, "--tile", str(2**63 - 1))
        self.refused(most, "plan", *SMALL, "--tile", str(2**63 - 1))
        self.refused("seed is -1, must be at least 0", "route", *SMALL, "--seed", "-1")
        self.refused("seed is -1, must be at least 0", "route", *SMALL, "--seed=-1")
        limit = f"seed is {2**64}, must be from 0 to {2**64 - 1}"
        self.refused(limit, "route", *SMALL, "--seed", str(2**64))
        for text in ("", "1.5", "x"):
            self.refused(f'seed is "{text}", must be an integer', "route", *SMALL, "--seed", text)
        self.refused("repeats is 0, must be at least 1", "bench", *SMALL, "--repeats", "0")
        self.refused(
            f"repeats is {2**31}, must be from -{2**31} to {2**31 - 1}",
            "bench",
            *SMALL,
            "--repeats",
            str(2**31),
        )
        for command in ("plan", "bench"):
            for name in ("fp32", "i32", "int8", ""):
                self.refused(
                    f'dtype is "{name}", must be one of: f32, bf16, f16, f64',
                    command,
                    *SMALL,
                    "--dtype",
                    name,
                )
        code, out, err = run("plan", *SMALL, "--device", "tpu")
        self.assertEqual((code, out), (2, ""))
        self.assertTrue(err.startswith('sonicmoe: device is "tpu", must be one of: h100, '), err)
        for engine, device, served in (
            ("hopper", "a100", "portable"),
            ("tcgen05", "h200", "hopper or portable"),
            ("portable", "cpu", "cpu"),
        ):
            self.refused(
                f'engine is "{engine}", must be {served} on {device}',
                "plan",
                *SMALL,
                "--device",
                device,
                "--engine",
                engine,
            )
        self.refused('pass is "all", must be one of: fwd, bwd, both', "bench", "--pass", "all")
        self.refused(
            'routing is "even", must be one of: topk, rounded, skewed', "bench", "--routing", "even"
        )
        self.refused('backend is "tpu", must be one of: cpu, cuda', "verify", "--backend", "tpu")
        self.refused(
            'filter is "no such case", must be part of a case\'s name',
            "verify",
            "--filter",
            "no such case",
        )
        self.refused("num_threads is -1, must be at least 0", "bench", "--threads", "-1")
        code, out, err = run("plan", "--config", "gpt-7")
        self.assertEqual((code, out), (2, ""))
        self.assertTrue(err.startswith('sonicmoe: config is "gpt-7", must be one of: 1.4B-n256'))
        for arguments in (["plan", "--unknown"], ["bench", "--repeats", "many"]):
            code, out, err = run(*arguments)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)


if __name__ == "__main__":
    COMMAND = sys.argv.pop(1)
    unittest.main()

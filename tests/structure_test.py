"""The structure check must be able to fail: one small tree for every rule."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CHECK = Path(__file__).resolve().parent.parent / "tools" / "check_structure.py"


def findings(files):
    """Runs the check over a tree of these files, in a git repository with one commit."""
    with tempfile.TemporaryDirectory() as folder:
        for path, text in files.items():
            (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / path).write_text(text)
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "A commit"]):
            subprocess.run(["git", "-C", folder, *arguments], check=True)
        done = subprocess.run(
            [sys.executable, CHECK, folder], capture_output=True, text=True, check=False
        )
        lines = done.stdout.strip().split("\n")
        assert done.returncode == (0 if lines == ["structure: clean"] else 1), done.stdout
        return lines[:-1]


def body(lines):
    return "{\n" + "  step();\n" * lines + "}\n"


class StructureTest(unittest.TestCase):
    def expect(self, path, text, *expected):
        self.assertEqual(findings({path: text}), [f"{path}:{line}" for line in expected])

    def test_accepts_ordinary_code(self):
        self.expect("src/core/a.cc", "// Adds: a + b; see x.\nint add(int a, int b)" + body(97))
        self.expect("src/a.h", "// Example:\n//   Sizes s = sizes(p);\nint x;\n")
        self.expect("src/core/philox.h", "#define HD __host__ __device__\n")
        self.expect("src/core/a.cc", 'const char* s = "__global__ asm(";\n')
        self.expect("docs/a.md", "See include/work/ and ~/work/ of your own.\n")

    def test_layers(self):
        self.expect("src/cpu/a.cc", "#include <torch/all.h>\n", "1: a Torch header outside python/")
        self.expect("src/a.cc", 'void f() {\n asm volatile("");\n}\n', "2: asm outside ptx/")
        self.expect("src/cuda/ptx/a.cuh", 'inline void f() { asm(""); }\n')
        self.expect("src/cuda/portable/ptx/a.cuh", 'inline void f() { asm(""); }\n')
        self.expect("src/cuda/sums/a.cuh", 'inline void f() { asm(""); }\n', "1: asm outside ptx/")
        self.expect("src/core/a.h", "#include <cuda_runtime.h>\n", "1: CUDA outside src/cuda/")
        self.expect("src/cpu/a.cc", "\n__global__ void f();\n", "2: CUDA outside src/cuda/")
        self.expect("src/core/b.h", "__device__ int f();\n", "1: CUDA outside src/cuda/")

    def test_includes(self):
        device = '#include "cuda/device/device.h"\n'
        self.expect("src/cuda/layer/a.cc", device + '#include "sonicmoe/moe.h"\n')
        self.expect("src/cuda/engines.cc", '#include "cuda/hopper/a.h"\n')
        self.expect("src/backends.cc", '#include "cpu/backend.h"\n#include "cuda/backend.h"\n')
        self.expect("src/cuda/hopper/a.cuh", '#include "generated.cuh"\n')
        self.expect("emulator/runtime/a.cc", '#include "machine.h"\n#include "runtime/api.h"\n')
        core = '\n#include "core/checks.h"\n'
        self.expect("emulator/a.cc", core, "2: the emulator must not include core/checks.h")
        for path, header in (
            ("src/cuda/device/a.cc", "cuda/layer/engine.h"),
            ("src/cuda/ptx/a.cuh", "cuda/hopper/ptx/b.cuh"),
            ("src/cuda/layer/a.cc", "cuda/engines.h"),
            ("src/cuda/hopper/a.h", "cuda/portable/b.h"),
            ("src/core/a.cc", "cpu/backend.h"),
        ):
            room = path.removeprefix("src/").rsplit("/", 1)[0]
            text = f'int x;\n#include "{header}"\n'
            self.expect(path, text, f"2: {room} must not include {header}")
        self.expect("src/cuda/attic/a.cc", "int x;\n", "1: a folder that INCLUDES does not have")

    def test_sizes(self):
        self.expect("src/a.cc", "int x;\n" * 601, "601: 601 lines, at most 600 are allowed")
        long = "int g();\nvoid f(int a)" + body(99)
        self.expect("src/a.cc", long, "2: f has 101 lines, at most 100")
        self.expect("src/cuda/a.cu", long)
        self.expect("src/cuda/a.cu", "void f()" + body(199), "1: f has 201 lines, at most 200")
        self.expect(
            "src/a.cc",
            "A::A(int a) : a_(a), b_{1} " + body(100),
            "1: A::A has 102 lines, at most 100",
        )
        nine = ", ".join(f"int a{i}" for i in range(9))
        self.expect("src/a.cc", f"void f({nine}) {{}}\n", "1: f has 9 parameters, at most 8")
        self.expect(
            "tools/a.py", "def f():\n" + "    g()\n" * 100, "1: f has 101 lines, at most 100"
        )

    def test_words(self):
        self.expect("docs/a.md", "Open /wo" + "rk/main.\n", "1: a path of one machine")
        self.expect("src/a.cc", "// TO" + "DO: later\n", "1: a note to self")
        self.expect("src/a.cc", "int x;\n// x = 3;\n", "2: code in a comment")
        self.expect("src/a.cc", "//return x;\n", "1: code in a comment")
        self.expect("src/a.cc", "  // run(x, y);\n", "1: code in a comment")

    def test_records(self):
        record = "benchmarks/results/h200/hot.json"
        self.expect(record, "{,}", "1: not JSON: Expecting property name enclosed in double quotes")
        self.expect(record, '{"rows": []}', "1: names no commit: ''")
        unknown = "0123456789"
        self.expect(
            record, f'{{"commit": "{unknown}"}}', f"1: commit {unknown} is not in the history"
        )


if __name__ == "__main__":
    unittest.main()

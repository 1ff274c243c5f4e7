"""The package as a thing: what its library needs, importing it, and the wheel."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import sonicmoe_cpp
import torch
from sonicmoe_cpp import _library

ROOT = Path(__file__).resolve().parents[2]
# The newest symbols that a Debian 12 or an Ubuntu 22.04 has.
NEWEST = {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13)}


def run(*command, **options):
    options = {"check": True, "capture_output": True, "text": True} | options
    return subprocess.run([str(part) for part in command], **options)


def symbols(library, *flags):
    return run("nm", "-D", *flags, library).stdout


def test_the_library_needs_no_python_and_nothing_new():
    needed = symbols(_library.path(), "--undefined-only")
    names = [line.split()[-1] for line in needed.splitlines()]
    assert not [name for name in names if re.match(r"_?Py[A-Z_]|_Py", name)]
    assert not [name for name in names if "c10" in name or "2at" in name]
    for name in names:
        for family, version in re.findall(r"@(GLIBCXX|GLIBC|CXXABI)_([\d.]+)", name):
            assert tuple(map(int, version.split("."))) <= NEWEST[family], name


def test_the_library_exports_nothing():
    defined = symbols(_library.path(), "--defined-only")
    ours = [line for line in defined.splitlines() if "sonicmoe" in line or "smoe_" in line]
    assert ours == []


def test_the_library_links_torch_by_name_alone():
    dynamic = run("readelf", "-d", _library.path()).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    assert "RUNPATH" not in dynamic and "RPATH" not in dynamic
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    assert needed - system <= {"libtorch_cpu.so", "libc10.so"}


def test_facts():
    assert sonicmoe_cpp.is_available() and sonicmoe_cpp.unsupported_reason() is None
    assert re.fullmatch(r"\d+\.\d+\.\d+", sonicmoe_cpp.__version__)
    version = (ROOT / "include/sonicmoe/version.h").read_text()
    assert f'"{sonicmoe_cpp.__version__}"' in version
    config = sonicmoe_cpp.show_config()
    for fact in (
        *sonicmoe_cpp.engines(),
        sonicmoe_cpp.__version__,
        torch.__version__,
        str(_library.path()),
        "threads",
    ):
        assert fact in config


def test_importing_touches_no_gpu_and_compiles_nothing():
    code = (
        "import sys, sonicmoe_cpp, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'torch._inductor' not in sys.modules and 'triton' not in sys.modules\n"
        "assert 'torch.utils.flop_counter' not in sys.modules\n"  # which imports triton
        "from torch.utils.flop_counter import flop_registry\n"
        "assert torch.ops.sonicmoe_cpp.moe_forward in flop_registry\n"
    )
    environment = os.environ | {"PATH": "/nonexistent", "CC": "false", "CXX": "false"}
    run(sys.executable, "-c", code, env=environment)


def test_a_missing_library_is_explained():
    code = (
        "import sonicmoe_cpp as s, torch\n"
        "print(s.unsupported_reason())\n"
        "assert not s.is_available() and s.show_config()\n"
        "x, w = torch.randn(3, 4), torch.randn(2, 6, 4)\n"
        "for call in (lambda: s.route(x, 2), lambda: s.h_views(torch.randn(3, 6), w)):\n"
        "    try: call()\n"
        "    except NotImplementedError as e: print(e)\n"
        "s.MoE(4, 2, 16, 8)\n"
    )
    environment = os.environ | {_library.VARIABLE: "/nonexistent/library.so"}
    said = run(sys.executable, "-c", code, env=environment).stdout.splitlines()
    assert said == ["the library /nonexistent/library.so does not exist: install the wheel, or set "
                    "SONICMOE_CPP_LIBRARY"] * 3  # fmt: skip


def pythons():
    """Every Python 3.10 to 3.13 of this machine."""
    found = {f"3.{sys.version_info.minor}": sys.executable}
    managed = [str(bin) for bin in Path.home().glob(".pyenv/versions/3.*/bin")]
    path = os.pathsep.join([*managed, os.environ["PATH"]])
    for minor in range(10, 14):
        # A name on the path may be a wrapper around nothing: ask it.
        other = shutil.which(f"python3.{minor}", path=path)
        facts = other and run(other, "-c", "import sys; print(sys.executable)", check=False)
        if facts and facts.returncode == 0:
            found.setdefault(f"3.{minor}", facts.stdout.strip())
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("scikit_build_core")
    out = tmp_path_factory.mktemp("wheel")
    options = ("--no-build-isolation", "--no-deps", "--disable-pip-version-check", "-q")
    # Kernels would take minutes to compile and change nothing of what is tested here.
    options += ("-C", "cmake.define.SONICMOE_CUDA=OFF")
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", out, ROOT, timeout=600)
    (path,) = out.glob("*.whl")
    return path


def site_of(venv):
    (site,) = venv.glob("lib/python*/site-packages")
    return site


@pytest.mark.slow
def test_the_wheel_serves_every_python(wheel, tmp_path):
    assert re.fullmatch(r"sonicmoe_cpp-[\d.]+-py3-none-\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    package = [name for name in names if ".dist-info/" not in name]
    assert all(re.fullmatch(r"sonicmoe_cpp/([\w/]+\.py|py\.typed|\w+\.so)", n) for n in package)
    assert {"sonicmoe_cpp/libsonicmoe_torch.so", "sonicmoe_cpp/integrations/hf.py"} <= set(package)

    # A fresh environment that sees this one's torch only.
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin/python")
    run(*pip, "install", "-q", "--no-deps", "--disable-pip-version-check", wheel)
    (site_of(venv) / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    code = (
        "import torch, sonicmoe_cpp as s\n"
        "layer = s.MoE(4, 2, 16, 8)\n"
        "out, aux = layer(torch.randn(10, 16))\n"
        "out.sum().backward()\n"
        "print(s.__file__)\n"
    )
    environment = {"PATH": "/nonexistent"}
    said = run(venv / "bin/python", "-c", code, env=environment, cwd=tmp_path).stdout
    assert str(venv) in said


@pytest.mark.slow
def test_every_python_imports_the_wheel_or_says_that_torch_is_missing(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    for version, python in pythons().items():
        command = (python, "-S", "-c", "import sonicmoe_cpp")
        environment = {"PYTHONPATH": str(tmp_path), "PATH": "/nonexistent"}
        result = run(*command, env=environment, cwd=tmp_path, check=False)
        last = result.stderr.strip().splitlines()[-1]
        assert result.returncode == 1, version
        assert last.startswith("ImportError: sonicmoe_cpp needs PyTorch 2.10 or later"), version


@pytest.mark.slow
def test_the_source_distribution_holds_what_it_builds_from(tmp_path):
    pytest.importorskip("build")
    out = tmp_path / "sdist"
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "-o", out, ROOT, timeout=300)
    (archive,) = out.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "source")
    (source,) = (tmp_path / "source").iterdir()
    for path in ("CMakeLists.txt", "python/CMakeLists.txt", "python/csrc/ops.cc", "LICENSE"):
        assert (source / path).is_file()
    assert not (source / "tests").exists() and not (source / "build").exists()
    configure = ("cmake", "-S", source, "-B", tmp_path / "out", "-DSONICMOE_BUILD_TORCH=ON")
    off = ("-DSONICMOE_BUILD_TESTS=OFF", "-DSONICMOE_BUILD_CLI=OFF", "-DSONICMOE_CUDA=OFF")
    run(*configure, *off, f"-DPython_EXECUTABLE={sys.executable}", timeout=120)

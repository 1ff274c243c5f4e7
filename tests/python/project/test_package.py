"""The package: what its library needs, importing it, and the wheel.

The wheel is built from the source distribution, without kernels; or it is the one that
SONICMOE_WHEEL names, as `make wheel` leaves it in dist/.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import sonicmoe_cpp
import torch
from days import turn
from packaging.requirements import Requirement
from sonicmoe_cpp import _library

ROOT = Path(__file__).resolve().parents[3]
# The newest symbols that manylinux_2_34 allows: those of RHEL 9.
NEWEST = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}
# With the kernels for four architectures a wheel has 7.4 MiB.
LARGEST_WHEEL = 24 << 20


def run(*command, **options):
    options = {"check": True, "capture_output": True, "text": True} | options
    return subprocess.run([str(part) for part in command], **options)


def symbols(library, *flags):
    return run("nm", "-D", *flags, library).stdout


def needed_names(library):
    return [line.split()[-1] for line in symbols(library, "--undefined-only").splitlines()]


def assert_nothing_new(library):
    for name in needed_names(library):
        for family, version in re.findall(r"@(GLIBCXX|GLIBC|CXXABI)_([\d.]+)", name):
            assert tuple(map(int, version.split("."))) <= NEWEST[family], name


def test_the_library_needs_no_python_and_nothing_new():
    names = needed_names(_library.path())
    assert not [name for name in names if re.match(r"_?Py[A-Z_]|_Py", name)]
    assert not [name for name in names if "c10" in name or "2at" in name]
    assert_nothing_new(_library.path())


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
        # The program on the path may be a wrapper without a Python: run it.
        other = shutil.which(f"python3.{minor}", path=path)
        facts = other and run(other, "-c", "import sys; print(sys.executable)", check=False)
        if facts and facts.returncode == 0:
            found.setdefault(f"3.{minor}", facts.stdout.strip())
    return found


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "-o", out, ROOT, timeout=300)
    (archive,) = out.glob("*.tar.gz")
    return archive


def files_of(folder):
    return {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}


def unpacked(archive, scratch):
    """Unpacks the sources to build/sdist. Writes only files whose content has changed, because the
    times in an archive are always new: a second run compiles nothing."""
    shutil.unpack_archive(archive, scratch)
    (new,) = (path for path in scratch.iterdir() if path.is_dir())
    source = ROOT / "build/sdist"
    for name, path in files_of(source).items():
        if name.parts[0] != "build" and not (new / name).is_file():
            path.unlink()
    for name, path in files_of(new).items():
        there = source / name
        if not there.is_file() or there.read_bytes() != path.read_bytes():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there)
    return source


@pytest.fixture(scope="module")
def wheel(request, tmp_path_factory):
    if "SONICMOE_WHEEL" in os.environ:
        return Path(os.environ["SONICMOE_WHEEL"]).resolve()
    pytest.importorskip("scikit_build_core")
    out = tmp_path_factory.mktemp("wheel")
    options = ("--no-build-isolation", "--no-deps", "--disable-pip-version-check", "-q")
    # Kernels and optimised code would take minutes to compile and change nothing of what is tested
    # here.
    options += ("-C", "cmake.define.SONICMOE_CUDA=OFF")
    options += ("-C", "cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O0")
    source = unpacked(request.getfixturevalue("sdist"), tmp_path_factory.mktemp("source"))
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", out, source, timeout=600)
    (path,) = out.glob("*.whl")
    return path


def required(name, found):
    """Adds the distribution `name` and all that it requires here to `found`, by name."""
    if name not in found:
        found[name] = metadata.distribution(name)
        for line in found[name].requires or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                required(need.name, found)
    return found


def environment_with_torch(folder):
    """The Python of a new environment that has only links to torch and to what torch requires."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in required("torch", {}).values():
        for name in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / name).exists():  # several distributions of CUDA share a folder
                (site / name).symlink_to(distribution.locate_file(name))
    return folder / "bin/python"


USE = """
import torch, sonicmoe_cpp as smoe
from sonicmoe_cpp.integrations import hf
layer = smoe.MoE(4, 2, 16, 8, dtype=torch.bfloat16)
x = torch.randn(10, 16, dtype=torch.bfloat16, requires_grad=True)
out, aux = layer(x)
(out.float().square().sum() + aux.loss).backward()
assert x.grad.isfinite().all() and all(p.grad is not None for p in layer.parameters())
try: smoe.moe(x, torch.zeros(3, 2), None, layer.w_up, layer.w_down)
except TypeError as error: print(error)  # through libtorch, by the system's libstdc++
try: hf.register()
except ImportError as error: print(error)
print(smoe.__version__, smoe.__file__)
"""


@turn(1, of=2)
@pytest.mark.slow
def test_the_wheel_holds_the_package_and_no_other_library(wheel, tmp_path):
    tag = r"linux_x86_64"
    if "SONICMOE_WHEEL" in os.environ:
        tag = r"manylinux_2_(\d|[12]\d|3[0-4])_x86_64"
    assert re.fullmatch(rf"sonicmoe_cpp-[\d.]+-py3-none-{tag}\.whl", wheel.name)
    assert wheel.stat().st_size < LARGEST_WHEEL
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if not name.endswith("/")]
        (about,) = (name for name in files if name.endswith(".dist-info/METADATA"))
        needs = re.findall(r"^Requires-Dist: (.*)$", archive.read(about).decode(), re.MULTILINE)
        archive.extract("sonicmoe_cpp/libsonicmoe_torch.so", tmp_path)
    assert [need for need in needs if "extra ==" not in need] == ["torch>=2.10"]
    package = [name for name in files if ".dist-info/" not in name]
    assert all(re.fullmatch(r"sonicmoe_cpp/([\w/]+\.py|py\.typed|\w+\.so)", n) for n in package)
    assert [n for n in package if n.endswith(".so")] == ["sonicmoe_cpp/libsonicmoe_torch.so"]
    ours = {f.relative_to(ROOT / "python").as_posix() for f in ROOT.glob("python/**/*.py")}
    assert ours == {n for n in package if n.endswith(".py")}
    assert_nothing_new(tmp_path / "sonicmoe_cpp/libsonicmoe_torch.so")


@turn(1, of=2)
@pytest.mark.slow
def test_the_wheel_works_where_only_torch_is_installed(wheel, tmp_path):
    python = environment_with_torch(tmp_path / "venv")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "-q", "--no-index", "--no-deps", wheel)
    environment = {"PATH": "/nonexistent"}
    said = run(python, "-c", USE, env=environment, cwd=tmp_path).stdout.splitlines()
    assert len(said) == 3
    assert said[0].startswith("topk_ids has dtype float32, must be")
    assert said[1].startswith("sonicmoe_cpp.integrations.hf needs transformers")
    assert said[2].startswith(f"{sonicmoe_cpp.__version__} {tmp_path}")


@pytest.mark.slow
def test_every_python_says_that_torch_is_missing(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    for version, python in pythons().items():
        command = (python, "-S", "-c", "import sonicmoe_cpp")
        environment = {"PYTHONPATH": str(tmp_path), "PATH": "/nonexistent"}
        result = run(*command, env=environment, cwd=tmp_path, check=False)
        last = result.stderr.strip().splitlines()[-1]
        assert result.returncode == 1, version
        assert last.startswith("ImportError: sonicmoe_cpp needs PyTorch 2.10 or later"), version


@pytest.mark.slow
def test_the_source_distribution_holds_no_more_than_a_build_needs(sdist, tmp_path):
    shutil.unpack_archive(sdist, tmp_path)
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert (source / "LICENSE").is_file() and (source / "README.md").is_file()
    for name in ("tests", "build", "docs", "benchmarks", "tools", ".ci"):
        assert not (source / name).exists(), name

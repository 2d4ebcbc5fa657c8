"""What the wheel holds, and that the package imports however it is reached."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMPORT_NAMES = {"replay_transformers": "replay_transformers", "kernels": "replay_transformers/kernels"}
IMPORT_NAMES["patches"] = "replay_transformers/patches"
SAMPLE_MODELS = ("qwen3_5", "nemotron_h")
# a namespace of optimum's, in which its command line looks for commands; importing them takes optimum
OPTIMUM_FOLDER, OPTIMUM_TARGET = "replay_transformers/optimum_commands", "optimum/commands/register"

pytestmark = pytest.mark.xdist_group("packaging")  # one process builds the wheel, once

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")

# Finders of an editable install would answer for a layout that does not work by itself.
WITHOUT_EDITABLE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not getattr(f, "__module__", "").startswith("__editable__")]
"""

IMPORTS = """
import importlib, pathlib
import replay_transformers as rt
from replay_transformers import kernels, patches
for name in {modules!r}:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] not in ("triton", "fla", "mamba_ssm"):
            raise
        continue
    file = pathlib.Path(module.__file__)
    assert pathlib.Path({where!r}) in file.parents, (name, file)
print(rt.__version__)
"""


def modules() -> dict[str, str]:
    """Every module of the package: its file below the checkout -> its file below site-packages."""
    found = {}
    for folder, target in IMPORT_NAMES.items():
        for file in (ROOT / folder).rglob("*.py"):
            inside = file.relative_to(ROOT / folder)
            if not any(part.startswith((".", "__pycache__")) for part in inside.parts):
                found[f"{folder}/{inside.as_posix()}"] = f"{target}/{inside.as_posix()}"
    return {file: target.replace(OPTIMUM_FOLDER, OPTIMUM_TARGET) for file, target in found.items()}


def import_names() -> list[str]:
    """What to import to see the whole package; importing a __main__ would run it."""
    names = [file.removesuffix(".py").replace("/", ".") for file in modules().values() if "optimum/" not in file]
    return [name.removesuffix(".__init__") for name in names if not name.endswith(".__main__")]


def python(
    code: str, cwd: Path, *path: Path, executable: str | Path = sys.executable, editable: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter: PYTHONPATH is `path` alone, and it sees no editable install of the checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if path:
        env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    if not editable:
        code = WITHOUT_EDITABLE + code
    done = subprocess.run([executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs: building in the checkout would leave folders there."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    copy.mkdir()
    for folder in IMPORT_NAMES:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


def test_setup_cfg_lists_every_package() -> None:
    folders = {Path(target).parent for target in modules().values()}
    expected = {".".join(folder.parts) for folder in folders}
    listed = set(SETUP["options"]["packages"].split())
    assert listed == expected, f"packages in setup.cfg: {sorted(expected - listed)} missing, {listed - expected} gone"


def test_kernels_and_patches_are_no_packages_of_their_own() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow Hugging Face's kernels library"
    assert not (ROOT / "patches" / "__init__.py").exists()


def test_wheel_top_level(wheel_names: set[str]) -> None:
    version = SETUP["metadata"]["version"]
    top = {name.split("/")[0] for name in wheel_names}
    assert top == {"replay_transformers", f"replay_transformers-{version}.dist-info", "optimum"}


def test_wheel_adds_one_file_to_the_namespace_of_optimum(wheel_names: set[str]) -> None:
    """An __init__.py there would hide optimum's own modules, and a file of optimum's would be lost by uninstalling."""
    assert {name for name in wheel_names if name.startswith("optimum")} == {f"{OPTIMUM_TARGET}/register_replay.py"}
    assert not (ROOT / OPTIMUM_FOLDER / "__init__.py").exists()
    importing = [file for file in modules() if "from optimum" in (ROOT / file).read_text()]
    assert importing == [f"{OPTIMUM_FOLDER}/register_replay.py"]


def test_wheel_holds_every_module(wheel_names: set[str]) -> None:
    assert set(modules().values()) == {name for name in wheel_names if name.endswith(".py")}
    for folder in ("kernels", "patches"):
        assert any(name.startswith(f"replay_transformers/{folder}/") for name in wheel_names)


def test_wheel_holds_the_data(wheel_names: set[str]) -> None:
    assert {"replay_transformers/py.typed", "replay_transformers/kernels/launch.json"} <= wheel_names
    models = ROOT / "replay_transformers" / "models"
    files = {path.relative_to(ROOT).as_posix() for path in models.rglob("*") if path.is_file()}
    assert files <= wheel_names
    assert "replay_transformers/models/README.md" in files
    for model in SAMPLE_MODELS:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            assert f"replay_transformers/models/{model}/{name}" in files


@pytest.mark.core
@pytest.mark.smoke
@pytest.mark.parametrize("cwd", ["checkout", "elsewhere"])
def test_import_uninstalled(cwd: str, tmp_path: Path) -> None:
    code = IMPORTS.format(modules=import_names(), where=str(ROOT))
    if cwd == "checkout":
        python(code, ROOT)
    else:
        python(code, tmp_path, ROOT)


def test_import_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    done = python(IMPORTS.format(modules=import_names(), where=str(unpacked)), tmp_path, unpacked)
    assert done.stdout.split()[-1] == SETUP["metadata"]["version"]


@pytest.mark.parametrize("mode", ["installed", pytest.param("editable", marks=pytest.mark.slow)])
def test_import_installed_by_pip(mode: str, source: Path, tmp_path: Path) -> None:
    venv, where = tmp_path / "venv", tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    interpreter = venv / "bin" / "python"
    target: list[str | Path] = [source]
    if mode == "editable":
        where = shutil.copytree(source, tmp_path / "checkout")
        target = ["--editable", where]
    pip("--python", interpreter, "install", "--no-deps", "--no-build-isolation", "--no-index", *target)

    code = IMPORTS.format(modules=import_names(), where=str(where)) + (
        "from importlib.util import find_spec\n"
        "for spec in (find_spec('kernels'), find_spec('patches')):\n"
        f"    assert spec is None or {str(where)!r} not in str(spec), spec\n"
    )
    done = python(code, tmp_path, executable=interpreter, editable=True)
    assert done.stdout.split()[-1] == SETUP["metadata"]["version"]
    assert interpreter.with_name("replay-transformers").exists()


STAND_IN = """
import importlib, importlib.util
import optimum.commands.base
spec = importlib.util.find_spec("optimum.commands.register")
files = [] if spec is None else [importlib.import_module("optimum.commands.register.register_replay").__file__]
print(len(files))
"""


def make_library_called_optimum(folder: Path) -> None:
    """A stand-in for optimum, as it is laid out: no __init__.py, and no folder for other packages' commands."""
    commands = folder / "optimum" / "commands"
    commands.mkdir(parents=True)
    (commands / "base.py").write_text("class BaseOptimumCLICommand: ...\ndef CommandInfo(**fields): return fields\n")


def test_optimum_survives_installing_and_uninstalling(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    interpreter, site = venv / "bin" / "python", next(venv.glob("lib/python*/site-packages"))
    make_library_called_optimum(site)
    before = sorted(path for path in site.rglob("*") if "__pycache__" not in path.parts)
    pip("--python", interpreter, "install", "--no-deps", "--no-index", wheel)
    assert python(STAND_IN, tmp_path, executable=interpreter).stdout.strip() == "1"
    pip("--python", interpreter, "uninstall", "--yes", "replay-transformers")
    assert python(STAND_IN, tmp_path, executable=interpreter).stdout.strip() == "0"
    assert sorted(path for path in site.rglob("*") if "__pycache__" not in path.parts) == before


def test_import_works_without_optimum() -> None:
    hidden = "sys.modules['optimum'] = None\n"
    python(hidden + IMPORTS.format(modules=import_names(), where=str(ROOT)), ROOT)


@pytest.mark.slow
def test_pytest_runs_from_any_folder(tmp_path: Path) -> None:
    for cwd, target in ((ROOT, "tests/test_poison.py"), (tmp_path, ROOT / "tests" / "test_poison.py")):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "marker", str(target)]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr


def make_library_called_kernels(folder: Path) -> None:
    """A stand-in for Hugging Face's kernels: a regular package with metadata, and any name can be imported from it."""
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text(
        "from unittest.mock import MagicMock\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n"
        "        raise AttributeError(name)\n"
        "    return MagicMock(name=name)\n"
    )
    metadata = folder / "kernels-0.17.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n")


USES_KERNELS_LIBRARY = """
import transformers, replay_transformers
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.nemotron_h import modeling_nemotron_h
from kernels import CUDAProperties
import kernels, replay_transformers.kernels
assert kernels is not replay_transformers.kernels
print(kernels.__file__)
"""


@pytest.mark.core
@pytest.mark.smoke
def test_another_library_called_kernels_is_not_shadowed(tmp_path: Path) -> None:
    make_library_called_kernels(tmp_path)
    done = python(USES_KERNELS_LIBRARY, ROOT, tmp_path)
    assert Path(done.stdout.strip()) == tmp_path / "kernels" / "__init__.py"


@pytest.mark.skipif(
    getattr(find_spec("kernels"), "origin", None) is None, reason="Hugging Face's kernels library is not installed"
)
def test_hugging_face_kernels_is_not_shadowed() -> None:
    done = python(USES_KERNELS_LIBRARY, ROOT)
    assert ROOT not in Path(done.stdout.strip()).parents or "site-packages" in done.stdout


SIDE_EFFECTS = """
import sys, torch, transformers
from transformers.generation import configuration_utils, utils
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.nemotron_h import modeling_nemotron_h

def snapshot():
    seen = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in ("torch", "transformers") and module is not None:
            for name, value in list(vars(module).items()):
                seen[module_name, name] = list(value) if isinstance(value, (list, set, tuple)) else id(value)
                if isinstance(value, type) and value.__module__ == module_name:
                    seen |= {(module_name, name, key): id(item) for key, item in list(vars(value).items())}
    return seen

before, modules = snapshot(), set(sys.modules)
import replay_transformers
after = snapshot()
changed = [key for key in before if key[-1][:1] != "_" and after.get(key) != before[key]]
changed += [key for key in before if "forward" in key[-1] and after.get(key) != before[key]]
assert not changed, changed
assert not torch.cuda.is_initialized()
assert not {name for name in set(sys.modules) - modules if name.split(".")[0] == "triton"}
assert not replay_transformers.is_enabled()
"""


@pytest.mark.core
@pytest.mark.smoke
def test_import_has_no_side_effects() -> None:
    python(SIDE_EFFECTS, ROOT)


def test_import_works_without_triton() -> None:
    references = [name for name in import_names() if name.endswith(".reference")]
    assert references
    python(f"sys.modules['triton'] = None\nimport replay_transformers, {', '.join(references)}", ROOT)

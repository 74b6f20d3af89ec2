"""The serving environment, the engine's runs in it, and what they are compared with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import Timeout

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from build_environment import build, environment_folder, is_built, link_packages, obstacle, python_of, variables  # noqa: E402

BUILD_VARIABLE = "HYPERDFLASH_BUILD_SERVING"


@pytest.fixture(scope="session")
def serving_python():
    """Python of the environment that has vLLM; without one the test is skipped, and the reason says what to do."""
    if reason := obstacle():
        pytest.skip(reason)
    folder = environment_folder()
    if not is_built(folder):
        if os.environ.get(BUILD_VARIABLE) != "1":
            pytest.skip(
                f"no serving environment; `python {HERE.relative_to(ROOT)}/build_environment.py` builds it once"
            )
        try:
            build(folder)
        except (subprocess.CalledProcessError, ValueError, Timeout) as error:
            pytest.skip(f"serving environment: {error}")
    link_packages(folder)
    return python_of(folder)


@pytest.fixture(scope="session")
def serving_variables(serving_python, tmp_path_factory):
    """Environment variables of an engine in its own process."""
    return variables(serving_python, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """The embedded target under DeepSeek's names, and the embedded drafter in the layout for vLLM."""
    from hyperdflash.conversion import ExportArguments, run_export

    folder = tmp_path_factory.mktemp("exported")
    for model, form, name in (
        ("tiny-target", "deepseek", "target"),
        ("tiny-hyperdflash", "vllm", "drafter"),
    ):
        run_export(ExportArguments(model=str(ROOT / "checkpoints" / model), to=form, output=str(folder / name)))
    return folder


@pytest.fixture(scope="session")
def exported_vanilla(tmp_path_factory):
    """A random vanilla DFlash drafter for the embedded target, as vLLM's own `dflash` reads it."""
    from hyperdflash.conversion import ExportArguments, InitArguments, run_export, run_init

    folder = tmp_path_factory.mktemp("vanilla")
    shape = {"num_hidden_layers": 2, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
    source = {"context_source": "multi_layer", "reducer": "fc", "stream_pooling": "mean", "dtype": "bfloat16"}
    target = str(ROOT / "checkpoints" / "tiny-target")
    run_init(InitArguments(target=target, output=str(folder / "fresh"), head_dim=64, **shape, **source))
    run_export(ExportArguments(model=str(folder / "fresh"), to="dflash", output=str(folder / "drafter")))
    return folder / "drafter"


class EngineRun:
    """An engine at work in a process of its own; `report` waits for it."""

    def __init__(self, python, variables, job, folder):
        self.output = folder / "out"
        (folder / "job.json").write_text(json.dumps(job))
        self.log = folder / "log"
        with self.log.open("wb") as log:
            command = [python, HERE / "engine_job.py", folder / "job.json", self.output]
            self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)

    def report(self) -> dict:
        if self.process.wait() != 0:
            raise RuntimeError(self.log.read_text(errors="replace")[-3000:])
        return json.loads(self.output.with_suffix(".json").read_text())

    def failure(self) -> str:
        """The engine's log, if it ended with an error."""
        assert self.process.wait() != 0, "the engine started"
        return self.log.read_text(errors="replace")


@pytest.fixture(scope="session")
def start_engine(serving_python, serving_variables, tmp_path_factory):
    """Starts an engine on a job (see engine_job.py). What still runs at the end is killed."""
    runs = []

    def start(job, **changes) -> EngineRun:
        folder = tmp_path_factory.mktemp("engine")
        run_variables = serving_variables | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | changes
        runs.append(EngineRun(serving_python, run_variables, job, folder))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()

"""`hyperdflash init` of DeepSeek-V4-Flash from a Hub on the loopback interface: bytes, seconds and memory.

    python benchmarks/init_from_hub.py --folder /tmp/init-from-hub

The repository has the names, shapes, dtypes and 46 shards of the real one; all but the gates is holes. The drafter is
the whole one, 965 M parameters in bfloat16: 2 GB in `folder`, deleted at the end. The first run is killed while it
writes the body; the second one is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "conversion")]

from hub_server import HubServer  # noqa: E402
from v4_flash import write_v4_flash  # noqa: E402

TARGET = "deepseek-ai/DeepSeek-V4-Flash"


def peak_bytes(process: subprocess.Popen) -> int:
    """The most memory that the process has had so far; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, help="A new folder for everything; deleted at the end.")
    folder = Path(parser.parse_args().folder)
    folder.mkdir(parents=True)
    try:
        gates = write_v4_flash(folder / "files")
        with HubServer(folder / "hub") as hub:
            hub.add_repository(TARGET, folder / "files")
            output = folder / "out" / "drafter"
            command = [sys.executable, "-m", "hyperdflash.cli", "init", "--target", TARGET, "--output", str(output)]
            environment = os.environ | hub.environment(folder / "cache")

            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            weights = output.parent / ".drafter.partial" / "model.safetensors"
            while not (weights.exists() and weights.stat().st_size > 5e8):
                assert process.poll() is None
                time.sleep(0.02)
            process.kill()
            process.wait()
            killed_at, before = weights.stat().st_size, len(hub.requests)

            start, peak, first, last = time.perf_counter(), 0, None, None
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            seen = before
            while process.poll() is None:
                peak = max(peak, peak_bytes(process))
                if len(hub.requests) > seen:
                    seen, last = len(hub.requests), time.perf_counter()
                    first = first or last
                time.sleep(0.01)
            seconds = time.perf_counter() - start
            report = json.loads(process.stdout.read())
            requests = hub.requests[before:]
        with safe_open(output / "model.safetensors", "pt") as saved:
            same = all(
                torch.equal(
                    saved.get_tensor(f"reducer.hc_{name}").view(torch.int32),
                    gates[f"hc_head_{name}"].view(torch.int32),
                )
                for name in ("fn", "base", "scale")
            )
            dtypes = {str(saved.get_slice(name).get_dtype()) for name in saved.keys()}
        found = {
            "killed_at_bytes_written": killed_at,
            "beside_the_drafter": sorted(path.name for path in output.parent.iterdir() if path != output),
            "bytes_sent_by_the_hub": sum(request.sent for request in requests),
            "requests": len(requests),
            "download_seconds": round(last - first, 2),
            "seconds": round(seconds, 1),
            "peak_gb": round(peak / 1e9, 2),
            "parameters": report["parameters"],
            "file_bytes": (output / "model.safetensors").stat().st_size,
            "dtypes": sorted(dtypes),
            "gates_equal_to_the_bit": same,
            "mask_token_id": report["mask_token_id"],
        }
        print(json.dumps(found, indent=2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

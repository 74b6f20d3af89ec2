"""`hyperdflash push`: a drafter's folder -> a repository on the Hub that `AutoModel.from_pretrained` loads."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers.utils import GENERATION_CONFIG_NAME

from ..configuration_hyperdflash import HyperDFlashConfig
from ..conversion.checkpoint import INDEX_FILE, SINGLE_FILE
from ..conversion.export_drafter import check_shapes, load_drafter_config
from ..conversion.weights import stored_shapes, weight_files
from ..trainer.doctor.arguments import DoctorArguments
from ..trainer.doctor.run import drafter_files, run_doctor
from ..utils.provenance import collect_provenance, published, read_provenance, write_provenance
from .arguments import PushArguments
from .card import CARD_FILE, FIGURE_FOLDER, build_card, copy_chat_template, target_of, write_card

PACKAGE = Path(__file__).resolve().parent.parent
IMAGES = (".svg", ".png", ".jpg", ".jpeg", ".gif", ".webp")
CODE_FILES = ("configuration_hyperdflash.py", "modeling_hyperdflash.py", "generation_hyperdflash.py")


def run_push(args: PushArguments, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Uploads card, config, weights, code files and provenance of `args.drafter`; or says what it would upload.

    The tokenizer is not among them: `config.json` points to the target's, by `target_name_or_path` and
    `target_revision`, which are `base_model` and `base_model_revision` where those are given. Nor is what else lies in
    the folder: checkpoints, and the target's tensors in `mtp` and `head`.

    Args:
        args: the options.
        command: the command line to record; `sys.argv` by default.

    Returns:
        JSON values: `repo_id`, `files` (name -> bytes), `bytes`, `left_out` (what stays behind, name -> bytes),
        `private`; after a push also `url`, `commit` and `pull_request` (`None` without one).

    Raises:
        ValueError: a folder that is no whole drafter, code files that differ from the installed ones, no diagnosis or
            one that found a fault; before anything is sent. huggingface_hub's own errors come from sending.
    """
    folder = Path(args.drafter)
    card = build_card(args, args.repo_id)  # refuses what is no drafter
    config = load_drafter_config(folder)
    check_shapes(folder, config, stored_shapes(folder))
    problems = [problem for problem in (code_problem(folder), doctor_problem(args)) if problem]
    if problems and not args.force:
        raise ValueError("; ".join(problems) + " (or --force true)")
    if target_of(args, config)[0] is None and config.target_name_or_path is not None:
        warnings.warn(
            f"config.json names the target {config.target_name_or_path!r}, which reads like a folder of this machine: "
            "--base_model says where others find it.",
            UserWarning,
            stacklevel=2,
        )
    own_card = folder / CARD_FILE
    if own_card.is_file() and args.results is None and args.repo_id.encode() not in own_card.read_bytes():
        warnings.warn(
            f"{CARD_FILE} of {args.drafter!r} is sent as it is and does not name {args.repo_id!r}: "
            "`hyperdflash card --repo_id` writes one that does.",
            UserWarning,
            stacklevel=2,
        )
    for problem in problems:
        warnings.warn(f"Pushed in spite of this: {problem}.", UserWarning, stacklevel=2)

    with tempfile.TemporaryDirectory(prefix=".push-", dir=folder.resolve().parent) as stage:
        collect_files(args, config, card, Path(stage))
        record = read_provenance(folder) or {}
        pushed = {"repo_id": args.repo_id, "revision": args.revision, "in_spite_of": problems}
        write_provenance(stage, published(record | {"pushed": collect_provenance(command, **pushed)}))
        paths = sorted(path for path in Path(stage).rglob("*") if path.is_file())
        files = {path.relative_to(stage).as_posix(): path.stat().st_size for path in paths}
        report = {"repo_id": args.repo_id, "private": args.private, "files": files, "bytes": sum(files.values())}
        report["left_out"] = left_out(folder, {name.split("/")[0] for name in files})
        return report if args.dry_run else report | upload(args, stage)


def upload(args: PushArguments, stage: str) -> dict[str, Any]:
    """Makes the repository and the branch where they are not there, and commits the files of the folder `stage`."""
    api = HfApi()
    api.create_repo(args.repo_id, private=args.private, exist_ok=True)
    if args.revision is not None and not args.revision.startswith("refs/"):
        api.create_branch(args.repo_id, branch=args.revision, exist_ok=True)
    # The client streams large folders, resumes them, and commits them in parts where one commit is not enough
    info = api.upload_folder(
        repo_id=args.repo_id,
        folder_path=stage,
        commit_message=args.commit_message,
        revision=args.revision,
        create_pr=args.create_pr,
    )
    return {"url": str(info.commit_url), "commit": info.oid, "pull_request": info.pr_url}


def code_problem(folder: Path) -> str | None:
    """Which of the folder's code files are not the installed ones; those that are missing are taken from there."""
    differ = [
        name
        for name in CODE_FILES
        if (folder / name).is_file() and (folder / name).read_bytes() != (PACKAGE / name).read_bytes()
    ]
    if not differ:
        return None
    return f"code files: found {', '.join(differ)} unlike the installed ones, wanted the same: save the drafter again"


def doctor_problem(args: PushArguments) -> str | None:
    """What `doctor` finds wrong with these weights, by a report on them or by running now; `None` if nothing.

    Raises:
        ValueError, OSError: a report that is none; what `doctor` itself raises.
    """
    if args.target is not None:
        report = run_doctor(DoctorArguments(drafter=args.drafter, target=args.target, data=args.data))
    elif args.doctor_report is None:
        return "doctor: found no diagnosis, wanted --doctor_report, or --target and --data"
    else:
        try:
            report = json.loads(Path(args.doctor_report).read_bytes())
            report["ok"], report["findings"], report["drafter_files"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"doctor_report: found something else in {args.doctor_report!r}, wanted what `doctor --json` prints"
            ) from None
        if report["drafter_files"] != drafter_files(args.drafter):
            return f"doctor_report: found the diagnosis of other files in {args.doctor_report!r}, wanted one of these"
    if report["ok"]:
        return None
    wrong = [f"{finding['check']}: {finding['message']}" for finding in report["findings"] if not finding["ok"]]
    return f"doctor: found {'; '.join(wrong)}"


def collect_files(args: PushArguments, config: HyperDFlashConfig, card: Any, stage: Path) -> None:
    """Puts into the folder `stage` what the repository will hold; weights as hard links where the disk allows it."""
    folder = Path(args.drafter)
    if (folder / GENERATION_CONFIG_NAME).is_file():
        shutil.copyfile(folder / GENERATION_CONFIG_NAME, stage / GENERATION_CONFIG_NAME)
    weights = weight_files(folder)
    for file in weights:
        link_or_copy(file, stage / file.name)
    if weights != [folder / SINGLE_FILE]:
        shutil.copyfile(folder / INDEX_FILE, stage / INDEX_FILE)
    for name in CODE_FILES:
        shutil.copyfile(folder / name if (folder / name).is_file() else PACKAGE / name, stage / name)

    copy_chat_template(folder, stage)

    keys = json.loads((folder / "config.json").read_bytes())
    base_model, revision = target_of(args, config)
    if base_model is not None:
        keys |= {"target_name_or_path": base_model, "target_revision": revision}
    (stage / "config.json").write_text(json.dumps(keys, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    if (folder / CARD_FILE).is_file() and args.results is None:
        shutil.copyfile(folder / CARD_FILE, stage / CARD_FILE)
        figures = folder / FIGURE_FOLDER
        if figures.is_dir() and not figures.is_symlink():  # a link may lead anywhere
            for file in (file for file in figures.iterdir() if file.suffix in IMAGES and file.is_file()):
                (stage / FIGURE_FOLDER).mkdir(exist_ok=True)
                shutil.copyfile(file, stage / FIGURE_FOLDER / file.name)
    else:
        write_card(card, args.results, stage / CARD_FILE)


def left_out(folder: Path, sent: set[str]) -> dict[str, int]:
    """Name -> bytes of what lies in `folder` and is not `sent`; the names of folders end in `/`."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        if path.name in sent:
            continue
        is_folder = path.is_dir() and not path.is_symlink()
        files = path.rglob("*") if is_folder else [path]
        sizes[path.name + "/" * is_folder] = sum(file.lstat().st_size for file in files if not file.is_dir())
    return sizes


def link_or_copy(source: Path, destination: Path) -> None:
    try:
        os.link(source.resolve(), destination)
    except OSError:
        shutil.copyfile(source, destination)


__all__ = ["CODE_FILES", "run_push"]

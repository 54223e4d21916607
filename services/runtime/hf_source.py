"""Models on a Hugging Face hub: `hf:ORG/REPO[/FILE]`; `HF_ENDPOINT` and `HF_TOKEN` are honoured.

A repository without a GGUF file is taken as a whole if it is a checkpoint in safetensors. Run as a program it downloads
and reports in JSON lines; `fetch_hub_file` runs that program, so that a download can be killed at any moment, also one
that hangs in the network.
"""

import errno
import json
import re
import sys
from pathlib import Path

from services.runtime.download import ModelSourceError, Progress, no_space, run_download
from services.runtime.settings import child_environment

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_UNREACHABLE = frozenset(
    {"ConnectionError", "ConnectTimeout", "ReadTimeout", "OfflineModeIsEnabled", "ProxyError", "SSLError"}
)
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


CHECKPOINT = "checkpoint"
"""The directory that a whole checkpoint is put into."""
_NEEDED = frozenset({"config.json", "tokenizer.json"})
_WANTED = _NEEDED | {
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
}


def fetch_hub_file(locator: str, staging: Path, progress: Progress) -> Path:
    """Download the file, or the whole checkpoint, that `locator` names into `staging` and return it."""
    organisation, _, rest = locator.partition("/")
    repository, _, file = rest.partition("/")
    if not (_NAME.fullmatch(organisation) and _NAME.fullmatch(repository)) or ".." in file.split("/"):
        raise ModelSourceError(f"'hf:{locator}' is not of the form hf:ORG/REPO or hf:ORG/REPO/FILE.")
    argv = [sys.executable, "-P", "-m", "services.runtime.hf_source", f"{organisation}/{repository}", file]
    argv.append(str(staging))
    environment = child_environment(variables=_QUIET)
    status, output = run_download(argv, environment, staging, progress, _read_progress)
    report = _last_report(output)
    if status == 0 and "path" in report:
        return Path(report["path"])
    if "No space left on device" in output:
        raise no_space(staging)
    raise ModelSourceError(report.get("error") or f"The download of hf:{locator} failed: {output[-500:]}")


def _read_progress(line: str) -> tuple[int | None, int | None]:
    total = _report(line).get("total_bytes")
    return None, int(total) if total else None


def _report(line: str) -> dict[str, str]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _last_report(output: str) -> dict[str, str]:
    return next((report for line in reversed(output.splitlines()) if (report := _report(line))), {})


def main(repository: str, file: str, directory: str) -> int:
    """Download `file`, or the repository's only GGUF file, or its checkpoint, into `directory`; report on stdout."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        info = HfApi().model_info(repository, files_metadata=True)
        sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or []}
        chosen = _choose(repository, file, list(sizes))
        _say(total_bytes=sum(sizes[name] or 0 for name in chosen))
        paths = [Path(hf_hub_download(repository, name, local_dir=directory)) for name in chosen]
        _say(path=str(paths[0] if len(paths) == 1 else _gather(paths, Path(directory) / CHECKPOINT)))
        return 0
    except ModelSourceError as error:
        _say(error=str(error))
    except Exception as error:  # an edge: whatever the hub's client raises becomes one sentence
        _say(error=_explain(error, repository))
    return 1


def _gather(paths: list[Path], directory: Path) -> Path:
    """Move the files of a checkpoint into a directory of their own, away from what the hub's client keeps."""
    directory.mkdir()
    for path in paths:
        path.rename(directory / path.name)
    return directory


def _choose(repository: str, file: str, names: list[str]) -> list[str]:
    """Return the one file to download, or all of a checkpoint, whose files lie at the top."""
    candidates = sorted(name for name in names if name.endswith(".gguf"))
    if file in names:
        return [file]
    if not file and len(candidates) == 1:
        return candidates
    weights = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    if not file and not candidates and weights and _NEEDED.issubset(names):
        return sorted(_WANTED.intersection(names)) + weights
    if not candidates:
        missing = f" '{file}'." if file else " and no checkpoint (config.json, tokenizer.json and *.safetensors)."
        raise ModelSourceError(f"hf:{repository} has no GGUF file{missing}")
    asked = f"hf:{repository} has no file '{file}'" if file else f"hf:{repository} has several model files"
    choices = "".join(f"\n  hf:{repository}/{name}" for name in candidates)
    raise ModelSourceError(f"{asked}. Set model.source to one of:{choices}")


def _explain(error: Exception, repository: str) -> str:
    name = type(error).__name__
    if name in {"RepositoryNotFoundError", "GatedRepoError"}:
        return (
            f"The hub has no repository '{repository}' that you may read. Check the name; a private or gated one "
            "needs HF_TOKEN."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "No space left on device"
    if name in _UNREACHABLE:
        return (
            f"Cannot download hf:{repository}: the hub cannot be reached ({name}). Check the network and "
            "HF_ENDPOINT, or set model.source to the path of a model file."
        )
    words = [line for line in str(error).splitlines() if line.strip()]
    return f"Cannot download hf:{repository}: {name}: {words[0][:300] if words else ''}"


def _say(**report: object) -> None:
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

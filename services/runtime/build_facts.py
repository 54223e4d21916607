"""What runs here: the commit where it can be known, the schema versions, the machine. Read once, at a start."""

import json
import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

from schemas import cache as cache_messages
from schemas import control, generation, output, step
from schemas.codec import Message
from schemas.control import BuildFacts

CPU_INFO = Path("/proc/cpuinfo")
ROOT = Path(__file__).resolve().parents[2]
MODEL_LABELS = ("model name", "Model", "Hardware")
FEATURE_LABELS = ("flags", "Features")
"""x86 and Arm call them differently."""


@cache
def build_facts() -> BuildFacts:
    """Return the facts of this process."""
    labels = _cpu_labels(CPU_INFO)
    return BuildFacts(
        commit=commit_of(ROOT) or _installed_commit(),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_model=next((labels[name] for name in MODEL_LABELS if name in labels), platform.processor()),
        cpu_features=tuple(sorted(set(next((labels[name] for name in FEATURE_LABELS if name in labels), "").split()))),
        num_cpus=os.cpu_count() or 0,
        schemas=schema_versions(),
    )


def schema_versions() -> dict[str, int]:
    """Return the major version of every message."""
    modules = {module.__name__ for module in (cache_messages, control, generation, output, step)}
    kinds = [kind for kind in Message.__subclasses__() if kind.__module__ in modules]
    return {kind.SCHEMA: kind.MAJOR for kind in sorted(kinds, key=lambda kind: kind.SCHEMA)}


def _cpu_labels(path: Path) -> dict[str, str]:
    """Return the labels of the first processor that the kernel lists; none where there is no such file."""
    labels: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return labels
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon and labels:
            break
        labels.setdefault(name.strip(), value.strip())
    return labels


def commit_of(root: Path) -> str:
    """Return the commit that a source tree's git directory points to; empty where there is none."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (loose := git / name).is_file():
            return loose.read_text(encoding="utf-8").strip()
        packed = (git / "packed-refs").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")


def _installed_commit() -> str:
    """Return the commit that pip installed from a repository (PEP 610), empty for a release."""
    try:
        text = metadata.distribution("natterjack").read_text("direct_url.json")
        commit = json.loads(text or "{}").get("vcs_info", {}).get("commit_id", "")
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    return commit if isinstance(commit, str) else ""

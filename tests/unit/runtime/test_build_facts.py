"""What a running instance says of its build and machine."""

import json
from pathlib import Path

from services.runtime import build_facts
from services.runtime.build_facts import commit_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_the_facts_name_machine_and_schemas():
    facts = build_facts.build_facts()
    assert facts.num_cpus >= 1
    assert facts.python.startswith("3.")
    assert facts.schemas["step_plan"] == 1
    assert facts.cpu_features == tuple(sorted(set(facts.cpu_features)))


def test_the_commit_of_a_source_tree(tmp_path):
    git = tmp_path / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text(f"{COMMIT}\n")
    assert commit_of(tmp_path) == COMMIT
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit_of(tmp_path) == ""
    (git / "packed-refs").write_text(f"# pack-refs\n{COMMIT} refs/heads/main\n")
    assert commit_of(tmp_path) == COMMIT
    (git / "refs/heads/main").write_text("f" * 40)
    assert commit_of(tmp_path) == "f" * 40
    assert commit_of(tmp_path / "absent") == ""


def test_processors_are_read_in_both_dialects_and_may_be_unknown(tmp_path):
    x86, arm = tmp_path / "x86", tmp_path / "arm"
    x86.write_text("processor : 0\nmodel name : Some CPU\nflags : sse avx2\n\nprocessor : 1\nflags : other\n")
    arm.write_text("processor : 0\nFeatures : fp asimd\n")
    assert build_facts._cpu_labels(x86)["flags"] == "sse avx2"
    assert build_facts._cpu_labels(arm)["Features"] == "fp asimd"
    assert build_facts._cpu_labels(Path("/absent")) == {}


def test_the_commit_that_pip_installed_from_a_repository(monkeypatch):
    class Distribution:
        text = json.dumps({"vcs_info": {"commit_id": COMMIT}})

        def read_text(self, name):
            return self.text

    monkeypatch.setattr(build_facts.metadata, "distribution", lambda name: Distribution())
    assert build_facts._installed_commit() == COMMIT
    Distribution.text = None
    assert build_facts._installed_commit() == ""

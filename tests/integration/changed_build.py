"""Makes the services of one deployment another build: a `sitecustomize` that changes them before they start."""

from tests.integration.command_line import ROOT, CommandLine

HEAD = "import sys\n"
SAMPLER = """
if "services.executor" in sys.orig_argv:
    from dataclasses import replace
    from services.executor.choosing import Choosing

    plain = Choosing.next_token

    def next_token(self, tokens, prompt_len):
        sampling = plain(self, tokens, prompt_len)
        is_changed = self._params.min_p > 0 and len(tokens) - prompt_len == 5
        return replace(sampling, banned=(*sampling.banned, *range(97, 123))) if is_changed else sampling

    Choosing.next_token = next_token
"""
"""From a request with `min_p`, the sixth token cannot be a small letter."""
MACHINE = """
from pathlib import Path
from importlib import metadata
from services.runtime import build_facts

plain = metadata.version
build_facts.CPU_INFO = Path(__file__).with_name("cpuinfo")
metadata.version = lambda name: "9.9.9" if name == "natterjack" else plain(name)
"""
"""Another version, on a machine with other CPU features (file `cpuinfo` beside it)."""


class ChangedCommandLine(CommandLine):
    """A command line whose processes run with `code` in front of everything."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONPATH": f"{self.directory / 'changed'}:{ROOT}", **self.variables}

    def change(self, code: str, **variables: str) -> "ChangedCommandLine":
        self.variables = variables
        folder = self.directory / "changed"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HEAD + code)
        return self

    def move_to(self, cpu_info: str) -> "ChangedCommandLine":
        """Let the processes believe in another processor (`MACHINE`)."""
        (self.directory / "changed" / "cpuinfo").write_text(cpu_info)
        return self

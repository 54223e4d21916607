"""Prints the project's dependencies from pyproject.toml, one a line, without those that are named as arguments."""

import re
import sys
import tomllib
from pathlib import Path

left_out = {name.lower().replace("_", "-") for name in sys.argv[1:]}
for requirement in tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]:
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
    if name not in left_out:
        print(requirement)

"""Build hook: compiles the native kernels into the wheel when there is a compiler.

Without one the package is installed all the same: the kernels are then compiled at first use, or the reference engine
runs and says so.
"""

import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileKernels(BuildHookInterface):
    """Adds `engine_core/kernels/compiled/*.so` to the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        sys.path.insert(0, self.root)
        from engine_core.kernels.build import KernelsUnavailableError, compile_packaged

        try:
            compile_packaged()
        except KernelsUnavailableError as reason:
            self.app.display_warning(f"The native kernels are not compiled: {reason}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append("engine_core/kernels/compiled/*.so")

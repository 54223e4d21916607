"""From a file's tensors to torch tensors of expected shapes, with an account of which were used."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine_core.errors import ModelFileError, UnsupportedModelError
from engine_core.weights.gguf import REMEDY, GgufFile


class NamedTensors:
    """Hands out tensors by name, each a private copy of `dtype` on `device`; `progress` hears the fraction taken."""

    def __init__(
        self,
        file: GgufFile,
        progress: Callable[[float], None],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.file = file
        self.progress = progress
        self.dtype = dtype
        self.device = device
        self.taken: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        """The tensor called `name`, times `scale`. Raises ModelFileError when it is missing or has another shape."""
        values = self._read(name, shape)
        return (values if scale == 1.0 else values * scale).to(self.device, self.dtype)

    def take_if_present(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """A tensor that is not computed with but made something of: float32 in main memory."""
        return self._read(name, shape) if name in self.file.tensors else None

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.file.tensor(name)
        if tensor.shape != shape:
            raise ModelFileError(
                f"{self.file.path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}; {REMEDY}"
            )
        self.taken.add(name)
        self.progress(len(self.taken) / len(self.file.tensors))
        values = tensor.dequantized()
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def refuse_leftovers(self) -> None:
        """Raise UnsupportedModelError for tensors that nobody took: without them the model would be wrong."""
        if leftovers := sorted(set(self.file.tensors) - self.taken):
            raise UnsupportedModelError(
                f"{self.file.path}: {len(leftovers)} tensors have no place in this architecture, "
                f"{leftovers[0]} first; use a model without them"
            )

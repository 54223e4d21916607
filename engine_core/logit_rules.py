"""What a row's options do to its logits before a token is chosen: masks, bias, penalties. Owns no state.

Order (that of vLLM's sampler, https://docs.vllm.ai/en/v0.20.0/api/vllm/v1/sample/sampler/):

    allowed tokens → banned tokens → bias → repetition, frequency and presence penalty

Each row is adjusted alone and only if it asks for something, so the cost is that of the rows that use an option.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_core.batch import Penalties, Sampling


def ruled(logits: Tensor, spec: Sampling) -> Tensor:
    """Return logits [vocab] as the spec's options make them, -inf for what is excluded; the input is left alone."""
    logits = logits.clone()
    if spec.allowed is not None:
        logits.masked_fill_(~allowed_tokens(spec.allowed, len(logits)), -torch.inf)
    if spec.banned:
        logits.index_fill_(0, torch.tensor(spec.banned), -torch.inf)
    if spec.bias:
        tokens, values = zip(*spec.bias, strict=True)
        logits.index_add_(0, torch.tensor(tokens), torch.tensor(values, dtype=logits.dtype))
    if spec.penalties is not None:
        penalise(logits, spec.penalties)
    return logits


def candidates(spec: Sampling, vocab_size: int) -> NDArray[np.int64]:
    """The tokens that are allowed and not banned, in rising order: [count]; the spec has a mask."""
    allowed = allowed_tokens(spec.allowed or b"", vocab_size).numpy()
    allowed[list(spec.banned)] = False
    return np.flatnonzero(allowed)


def is_candidate(token: int, spec: Sampling) -> bool:
    """Whether `candidates` would hold a token."""
    mask = spec.allowed or b""
    return token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1) and token not in spec.banned


def allowed_tokens(mask: bytes, vocab_size: int) -> Tensor:
    """Unpack a bitmask → bool [vocab]."""
    filled = mask.ljust(-(-vocab_size // 8), b"\0")
    bits = np.unpackbits(np.frombuffer(filled, dtype=np.uint8), count=vocab_size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def penalise(logits: Tensor, penalties: Penalties) -> None:
    """Apply all three penalties to logits [vocab] in place.

    Repetition (Keskar et al., "CTRL", arXiv:1909.05858, section 4.1) divides a positive logit and multiplies a negative
    one; frequency and presence are OpenAI's.
    """
    if penalties.repetition != 1.0 and (seen := {*penalties.prompt, *penalties.generated}):
        tokens = torch.tensor(sorted(seen))
        values = logits[tokens]
        factor = penalties.repetition
        logits[tokens] = torch.where(values > 0, values / factor, values * factor)
    if penalties.generated and (penalties.frequency or penalties.presence):
        generated, counts = np.unique(np.array(penalties.generated), return_counts=True)
        logits[torch.from_numpy(generated)] -= penalties.frequency * torch.from_numpy(counts) + penalties.presence

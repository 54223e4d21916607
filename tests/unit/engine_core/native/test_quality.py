"""True to the model: the native engine's distributions against the float32 reference's on ordinary English text.

The text is prose from Python's own documentation, which every installation carries. The short form scores 512 tokens,
the long one (`-m slow`) 4,096, whose figures are the ones to quote.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from engine_core import reference
from engine_core.batch import Row, Sampling
from engine_core.engine import EngineConfig
from engine_core.kernels.binding import CacheKind
from engine_core.native.engine import NativeEngine
from engine_core.native.loading import NativeOptions, load
from engine_core.weights.gguf import open_gguf

DOCUMENT_TOKENS = 512
BLOCKS = tuple(range(DOCUMENT_TOKENS // 16))
MAX_MEAN_KL_NATS = 0.005
MIN_AGREEMENT = 0.95


@dataclass(frozen=True)
class Comparison:
    """How far one distribution per token is from another."""

    mean_kl_nats: float
    max_kl_nats: float
    agreement: float


def english_prose() -> str:
    """Paragraphs of Python's documentation that are sentences, not code or grammar."""
    paragraphs = [" ".join(part.split()) for topic in topics.values() for part in re.split(r"\n\s*\n", topic)]
    return "\n".join(
        paragraph
        for paragraph in paragraphs
        if len(paragraph) > 200
        and "::" not in paragraph
        and sum(letter.isalpha() or letter == " " for letter in paragraph) > 0.93 * len(paragraph)
    )


def documents(path: Path, count: int) -> list[tuple[int, ...]]:
    """`count` stretches of DOCUMENT_TOKENS tokens of prose."""
    file = open_gguf(path)
    vocabulary = {str(token): index for index, token in enumerate(file.array_values("tokenizer.ggml.tokens"))}
    merges = [tuple(str(merge).split(" ")) for merge in file.array_values("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokens = tokenizer.encode(english_prose()).ids
    assert len(tokens) >= count * DOCUMENT_TOKENS
    return [tuple(tokens[i * DOCUMENT_TOKENS : (i + 1) * DOCUMENT_TOKENS]) for i in range(count)]


def reference_logits(path: Path, document: tuple[int, ...]) -> Tensor:
    engine = reference.load(EngineConfig(model_path=path, num_blocks=len(BLOCKS)), lambda stage, fraction: None)
    row = Row(document, 0, BLOCKS, DOCUMENT_TOKENS, Sampling(position=DOCUMENT_TOKENS, seed=0))
    return engine.logits_after_each_token(row)


def native_engine(path: Path, kind: CacheKind) -> NativeEngine:
    config = EngineConfig(model_path=path, num_blocks=len(BLOCKS), max_model_len=DOCUMENT_TOKENS)
    return load(config, lambda stage, fraction: None, NativeOptions(kind))


def compare(expected: Tensor, logits: Tensor) -> Comparison:
    """Of logits [tokens, vocab] each."""
    wanted, got = expected.log_softmax(-1), logits.log_softmax(-1)
    divergence = (wanted.exp() * (wanted - got)).sum(-1)
    agreement = (expected.argmax(-1) == logits.argmax(-1)).float().mean()
    return Comparison(float(divergence.mean()), float(divergence.max()), float(agreement))


def check(path: Path, num_documents: int, kinds: list[CacheKind]) -> None:
    texts = documents(path, num_documents)
    expected = torch.cat([reference_logits(path, text) for text in texts])
    for kind in kinds:
        engine = native_engine(path, kind)
        logits = [engine.logits_after_each_token([Row(text, 0, BLOCKS, DOCUMENT_TOKENS)]) for text in texts]
        result = compare(expected, torch.cat(logits))
        print(f"{kind.name} cache, {len(expected)} tokens: {result}")
        assert result.mean_kl_nats <= MAX_MEAN_KL_NATS
        assert result.agreement >= MIN_AGREEMENT


def test_distributions_are_those_of_the_reference_on_a_page_of_english(model_path):
    check(model_path, 1, [CacheKind.INT8])


@pytest.mark.slow
def test_distributions_are_those_of_the_reference_on_4096_tokens_of_english(model_path):
    check(model_path, 8, list(CacheKind))

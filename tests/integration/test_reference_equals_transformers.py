"""The reference engine against Hugging Face transformers, float32, on the default model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM

from engine_core.batch import Row, Sampled, Sampling
from engine_core.engine import EngineConfig
from engine_core.pooling import HiddenPool
from engine_core.reference import ReferenceEngine, load
from tests.integration.transformers_llama import transformers_llama

NUM_NEW_TOKENS = 64
TIE = 1e-4
"""Where the two best logits are this close, rounding decides, and the comparison of that prompt ends."""
LOGPROB_TOLERANCE = 2e-4
EMBEDDING_TOLERANCE = 2e-5
"""Of a value of a vector of length 1, both sides in float32."""
BLOCKS_PER_SEQUENCE = 8

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhat is the speed of light?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nThree fruits?<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Photosynthesis is the process by which",
    "import numpy as np\n\nx = np.",
    "Die Hauptstadt von Deutschland ist",
    "Il était une fois",
    "SELECT name, age FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "Q: How many legs does a spider have?\nA:",
    "Ingredients:\n- 2 eggs\n- 1 cup of flour\n-",
    "In 1969, Neil Armstrong",
    "naïve café 😀 ünïcödé:",
    '{"name": "Alice", "age": 30, "city":',
    "To be, or not to be, that is",
    "!",
    "<|im_start|>user\nWrite a haiku about autumn.<|im_end|>\n<|im_start|>assistant\n",
]


@dataclass(frozen=True)
class Generated:
    """One prompt's tokens and what our engine said after them."""

    prompt: tuple[int, ...]
    output: tuple[Sampled, ...]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *(sampled.token for sampled in self.output)]


@pytest.fixture(scope="module")
def reader(model_path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(model_path)


@pytest.fixture(scope="module")
def transformers_model(reader: gguf.GGUFReader) -> LlamaForCausalLM:
    return transformers_llama(reader)


@pytest.fixture(scope="module")
def prompts(reader: gguf.GGUFReader) -> list[tuple[int, ...]]:
    """The prompts by the model's own vocabulary; how exactly the text is cut does not matter here."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return [tuple(tokenizer.encode(text).ids) for text in PROMPTS]


@pytest.fixture(scope="module")
def engine(model_path: Path) -> ReferenceEngine:
    num_blocks = len(PROMPTS) * BLOCKS_PER_SEQUENCE
    return load(EngineConfig(model_path=model_path, num_blocks=num_blocks), lambda stage, fraction: None)


@pytest.fixture(scope="module")
def generated(engine: ReferenceEngine, prompts: list[tuple[int, ...]]) -> list[Generated]:
    """All prompts in one batch, greedily, logprobs included."""
    outputs: list[list[Sampled]] = [[] for _ in prompts]
    for step in range(NUM_NEW_TOKENS):
        rows = []
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            blocks = tuple(range(index * BLOCKS_PER_SEQUENCE, (index + 1) * BLOCKS_PER_SEQUENCE))
            end = len(prompt) + step
            sampling = Sampling(position=end, seed=0, temperature=0.0, num_logprobs=0)
            tokens, start = ((output[-1].token,), end - 1) if output else (prompt, 0)
            rows.append(Row(tokens, start, blocks, len(prompt), sampling))
        for output, sampled in zip(outputs, engine.step(rows), strict=True):
            output.append(sampled)
    return [Generated(prompt, tuple(output)) for prompt, output in zip(prompts, outputs, strict=True)]


@pytest.fixture(scope="module")
def expected_logits(transformers_model: LlamaForCausalLM, generated: list[Generated]) -> list[torch.Tensor]:
    """By teacher forcing: transformers' logits [NUM_NEW_TOKENS, vocab] at each generated position, per prompt."""
    with torch.inference_mode():
        return [
            transformers_model(torch.tensor([case.tokens[:-1]])).logits[0, len(case.prompt) - 1 :].clone()
            for case in generated
        ]


def comparable(
    generated: list[Generated], expected_logits: list[torch.Tensor]
) -> Iterator[tuple[Generated, int, torch.Tensor]]:
    """(case, step, transformers' logits) up to each prompt's first tie."""
    for case, logits in zip(generated, expected_logits, strict=True):
        for step, row in enumerate(logits):
            best, second = row.topk(2).values.tolist()
            if best - second < TIE:
                break
            yield case, step, row


def test_greedy_tokens_equal_those_of_transformers(generated, expected_logits):
    compared = list(comparable(generated, expected_logits))
    differences = [
        (case.prompt[:5], step) for case, step, row in compared if case.output[step].token != int(row.argmax())
    ]
    assert differences == []
    assert len(PROMPTS) >= 20
    # Ties are rare: nearly all of the tokens must have been compared.
    assert len(compared) >= 0.9 * len(PROMPTS) * NUM_NEW_TOKENS


def test_logprobs_equal_those_of_transformers(generated, expected_logits):
    worst = max(
        abs(case.output[step].logprob - float(torch.log_softmax(row.double(), 0)[case.output[step].token]))
        for case, step, row in comparable(generated, expected_logits)
    )
    assert worst < LOGPROB_TOLERANCE


def test_embeddings_equal_those_of_transformers(engine, transformers_model, prompts):
    worst = {"mean": 0.0, "last": 0.0}
    for prompt in prompts:
        row = Row(prompt, 0, tuple(range(BLOCKS_PER_SEQUENCE)), len(prompt), hidden="all")
        [hidden] = engine.hidden_states([row])
        with torch.inference_mode():
            states = transformers_model.model(torch.tensor([prompt])).last_hidden_state[0].double()
        for kind, expected in (("mean", states.mean(0)), ("last", states[-1])):
            pool = HiddenPool(kind)
            pool.add(hidden)
            difference = (torch.from_numpy(pool.vector()) - expected / expected.norm()).abs().max()
            worst[kind] = max(worst[kind], float(difference))
    assert max(worst.values()) < EMBEDDING_TOLERANCE

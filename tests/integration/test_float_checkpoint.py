"""The default model as a float checkpoint: what is made of it equals what is made of the GGUF file."""

import json
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
import torch

from engine_core import reference
from engine_core.batch import Row, Sampling
from engine_core.engine import EngineConfig
from engine_core.token_bytes import read_token_bytes
from services.tokenizer.checkpoint_vocabulary import open_vocabulary
from services.tokenizer.vocabulary import VocabularyError
from tests.checkpoint_export import export_checkpoint, write_tokenizer
from tests.integration.conftest import start_deployment
from tests.integration.test_tokenizer_equals_transformers import CORPUS

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def vocabulary_only(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    directory = tmp_path_factory.mktemp("vocabulary")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(model_path).fields.items()}
    write_tokenizer(fields, directory)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 8192, "eos_token_id": [2, 0]}))
    return directory


def test_the_vocabulary_of_tokenizer_json_is_that_of_the_gguf_file(model_path: Path, vocabulary_only: Path) -> None:
    ours, theirs = open_vocabulary(vocabulary_only), open_vocabulary(model_path)
    assert ours.token_bytes == theirs.token_bytes
    assert ours.special_token_ids == theirs.special_token_ids
    assert ours.end_token_ids == (2, 0)
    assert (ours.prefix_token_ids, ours.context_length) == (theirs.prefix_token_ids, theirs.context_length)
    assert (ours.chat_template, ours.template_tokens) == (theirs.chat_template, theirs.template_tokens)
    for text in CORPUS:
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text, add_special_tokens=True)


def test_grammars_see_the_same_tokens(model_path: Path, vocabulary_only: Path) -> None:
    ours, theirs = read_token_bytes(vocabulary_only), read_token_bytes(model_path)
    assert (ours.texts, ours.special, ours.ends) == (theirs.texts, theirs.special, (2, 0))


def test_what_a_checkpoint_says_of_its_vocabulary_in_other_ways(vocabulary_only: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((vocabulary_only / "tokenizer.json").read_text())
    begin = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": begin,
        "pair": [*begin, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    vocabulary = open_vocabulary(tmp_path)
    assert vocabulary.prefix_token_ids == (1,)
    assert vocabulary.encode("a", add_special_tokens=True)[0] == 1
    assert (vocabulary.end_token_ids, vocabulary.chat_template) == ((2,), "named")
    (tmp_path / "chat_template.jinja").write_text("a file of its own")
    assert open_vocabulary(tmp_path).chat_template == "a file of its own"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not readable"),
        ("config.json", "{}", "context length"),
        ("config.json", "nonsense", "not readable as JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
    ],
)
def test_a_wrong_file_is_named(vocabulary_only: Path, tmp_path: Path, file: str, content: str, words: str) -> None:
    for path in vocabulary_only.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_text(content)
    with pytest.raises(VocabularyError, match=words):
        open_vocabulary(tmp_path)


# ---- with the weights


@pytest.fixture(scope="module")
def checkpoint(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_checkpoint(model_path, tmp_path_factory.mktemp("checkpoint"))


def generated(path: Path, prompts: list[tuple[int, ...]]) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of each prompt, and the logits after the prompts."""
    config = EngineConfig(model_path=path, num_blocks=8 * len(prompts), num_threads=1)
    engine = reference.load(config, lambda stage, fraction: None)
    texts = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    logits = torch.empty(0)
    for _ in range(NUM_TOKENS):
        rows = [
            Row(
                tuple(text[start:]),
                start,
                tuple(range(8 * number, 8 * number + 8)),
                len(prompts[number]),
                Sampling(position=len(text), seed=0, temperature=0.0),
            )
            for number, (text, start) in enumerate(zip(texts, done, strict=True))
        ]
        logits = logits if len(logits) else engine.logits(rows)
        done = [len(text) for text in texts]
        for text, sampled in zip(texts, engine.step(rows), strict=True):
            text.append(sampled.token)
    return texts, logits


@pytest.mark.slow
def test_float32_weights_give_the_bits_that_the_gguf_file_gives(model_path: Path, checkpoint: Path) -> None:
    vocabulary = open_vocabulary(checkpoint)
    prompts = [vocabulary.encode(text[:120], add_special_tokens=True) for text in CORPUS[:4]]
    (tokens, logits), (expected_tokens, expected_logits) = (
        generated(checkpoint, prompts),
        generated(model_path, prompts),
    )
    assert tokens == expected_tokens
    assert torch.equal(logits, expected_logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [("executor.engine=reference",), ("executor.quantise=q8_0",), ("executor.engine=torch", "executor.device=cpu")],
)
def test_a_deployment_serves_the_checkpoint(checkpoint: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    served = start_deployment(tmp_path, f"model.source={checkpoint}", "executor.num_blocks=256", *settings)
    try:
        chat: dict[str, Any] = {
            "model": "smol",
            "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
            "temperature": 0,
            "max_tokens": 20,
        }
        answer = httpx.post(f"{served.http_url}/v1/chat/completions", json=chat, timeout=60).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        bound = {"prompt": "Frogs", "structured_outputs": {"regex": "[ab]{3}"}, "max_tokens": 9}
        text = httpx.post(f"{served.http_url}/v1/completions", json=bound, timeout=60).json()["choices"][0]["text"]
        assert len(text) == 3
        assert set(text) <= {"a", "b"}
    finally:
        served.stop()

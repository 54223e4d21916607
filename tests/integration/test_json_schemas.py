"""Structured output over hundreds of schemas: what is generated validates; what cannot be followed is refused."""

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest

from engine_core.grammar import Grammars
from engine_core.token_bytes import TokenBytes, read_token_bytes
from schemas.errors import InvalidParameter
from services.runtime.model_source import resolve
from services.runtime.settings import ModelSettings
from services.tokenizer.grammar_check import GrammarCheck
from services.tokenizer.structured_output import json_grammar
from services.tokenizer.vocabulary import read_vocabulary
from tests.integration.acceptance import TIMEOUT_S, C
from tests.integration.conftest import Deployment
from tests.integration.json_schemas import HONOURED, REFUSED

CASES = [(kind, schema) for kind, schemas in HONOURED.items() for schema in schemas]
EVERY_NTH = 9
NUM_FREE_TOKENS, MAX_TOKENS = 40, 400
CLOSING = (b"}", b"]", b'"', b"null", b"0", b"]}", b'"}', b'"]', b",", b":")


def name_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True)[:70]


@dataclass
class Grammar:
    """The tokenizer's and the executor's sides of grammars over the real model's vocabulary."""

    check: GrammarCheck
    grammars: Grammars
    vocabulary: TokenBytes

    def source(self, schema: Any) -> str:
        source = json_grammar(schema, "response_format")
        self.check.check(source)
        return source.text

    def texts(self, schema: Any, count: int) -> Iterator[bytes]:
        """What a model with no opinion says: `count` random walks, those that came to an end."""
        source = self.source(schema)
        walks = (self._walk(source, random.Random(f"{source}{number}")) for number in range(count))
        return (text for text in walks if text is not None)

    def _walk(self, source: str, choose: random.Random) -> bytes | None:
        grammar = self.grammars.begin(source)
        generated: list[int] = []
        closing = [self.vocabulary.texts.index(text) for text in CLOSING if text in self.vocabulary.texts]
        for number in range(MAX_TOKENS):
            grammar.advance(generated)
            assert not grammar.is_broken
            if grammar.is_complete:
                break
            allowed = np.unpackbits(np.frombuffer(grammar.mask(), np.uint8), bitorder="little")
            usual = [token for token in closing if allowed[token]]
            ends = [token for token in self.vocabulary.ends if allowed[token]]
            if ends and (number > NUM_FREE_TOKENS or choose.random() < 0.5):
                break
            if usual and (number > NUM_FREE_TOKENS or choose.random() < 0.4):
                generated.append(usual[0] if number > NUM_FREE_TOKENS else choose.choice(usual))
            else:
                generated.append(int(choose.choice(np.flatnonzero(allowed))))
            if generated[-1] in self.vocabulary.ends:
                generated.pop()
                break
        else:
            return None
        return b"".join(self.vocabulary.texts[token] for token in generated)


@pytest.fixture(scope="module")
def grammar(model_path: Path) -> Iterator[Grammar]:
    check = GrammarCheck(read_vocabulary(resolve(ModelSettings())), is_enabled=True)
    vocabulary = read_token_bytes(model_path)
    yield Grammar(check, Grammars(lambda: vocabulary), vocabulary)
    check.close()


def exact(value: Any) -> Any:
    """JSON with decimal numbers: 0.3 is a multiple of 0.1."""
    return json.loads(value if isinstance(value, (str, bytes)) else json.dumps(value), parse_float=Decimal)


def validate(text: bytes, schema: Any) -> None:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    value = exact(text.decode("utf-8"))
    errors = list(kind(exact(schema), format_checker=kind.FORMAT_CHECKER).iter_errors(value))
    assert not errors, f"{text!r} does not follow {json.dumps(schema)}: {errors[0].message}"


def check_honoured(grammar: Grammar, schema: Any, num_walks: int) -> None:
    texts = list(grammar.texts(schema, num_walks))
    assert texts, "no text came to an end"
    for text in texts:
        validate(text, schema)


def check_refused(grammar: Grammar, keyword: str, schema: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        grammar.source(schema)
    assert refused.value.param == "response_format"
    assert keyword in refused.value.message
    assert "<state>" not in refused.value.message


def test_there_are_at_least_three_hundred_schemas() -> None:
    assert len({json.dumps(schema, sort_keys=True) for _, schema in itertools.chain(CASES, REFUSED)}) >= 300


@pytest.mark.parametrize(("kind", "schema"), CASES[::EVERY_NTH], ids=name_of)
def test_what_is_generated_validates(grammar: Grammar, kind: str, schema: Any) -> None:
    check_honoured(grammar, schema, num_walks=4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "schema"), CASES, ids=name_of)
def test_what_is_generated_validates_for_every_schema(grammar: Grammar, kind: str, schema: Any) -> None:
    check_honoured(grammar, schema, num_walks=24)


@pytest.mark.parametrize(("keyword", "schema"), REFUSED, ids=name_of)
def test_what_cannot_be_followed_is_refused_by_name(grammar: Grammar, keyword: str, schema: Any) -> None:
    check_refused(grammar, keyword, schema)


@pytest.mark.slow
async def test_every_schema_over_http_validates_or_is_refused(deployment: Deployment) -> None:
    turns = asyncio.Semaphore(16)
    finished: list[str] = []

    async def ask(http: httpx.AsyncClient, schema: Any, keyword: str | None) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        body = {"prompt": "As JSON: ", "max_tokens": 150, "temperature": 1.0, "seed": 7, "response_format": form}
        async with turns:
            response = await http.post(C, json=body)
        if keyword is not None:
            assert response.status_code == 400, (schema, response.text)
            error = response.json()["error"]
            assert (error["param"], keyword in error["message"]) == ("response_format", True) or schema is False, error
            return
        assert response.status_code == 200, (schema, response.text)
        [choice] = response.json()["choices"]
        if choice["finish_reason"] == "stop":
            finished.append(choice["text"])
            validate(choice["text"].encode(), schema)
        else:
            assert choice["finish_reason"] == "length"

    async with (
        httpx.AsyncClient(base_url=deployment.http_url, timeout=10 * TIMEOUT_S) as http,
        asyncio.TaskGroup() as group,
    ):
        for _, schema in CASES:
            group.create_task(ask(http, schema, None))
        for keyword, schema in REFUSED:
            group.create_task(ask(http, schema, keyword))
    assert len(finished) > 0.6 * len(CASES)

"""/tokenize and /detokenize: the same tokens as a generation, and nothing but tokens back."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from schemas.tokenization import DetokenizeRequest, TokenizeReply, TokenizeRequest
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.tokenization import detokenize, tokenize
from services.tokenizer.validation import Validator
from services.tokenizer.vocabulary import BYTE_CHAT_TEMPLATE, byte_vocabulary

BYTES = byte_vocabulary()
VALIDATOR = Validator("smol", BYTES, ChatTemplate(BYTE_CHAT_TEMPLATE, BYTES.template_tokens))


def encoded(**fields: Any) -> TokenizeReply:
    return tokenize(TokenizeRequest.model_validate(fields), VALIDATOR, BYTES, 100)


def decoded(*tokens: int, model: str | None = None) -> str:
    return detokenize(DetokenizeRequest(model=model, tokens=tokens), VALIDATOR, BYTES).prompt


@given(st.text())
def test_text_comes_back(text: str) -> None:
    reply = encoded(prompt=text)
    assert (reply.count, reply.max_model_len, reply.token_strs) == (len(reply.tokens), 100, None)
    assert decoded(*reply.tokens) == text


def test_a_conversation_is_encoded_as_a_generation_begins() -> None:
    messages = ({"role": "user", "content": "hi"},)
    assert bytes(encoded(messages=messages).tokens) == b"user: hi\nassistant: "
    assert bytes(encoded(messages=messages, add_generation_prompt=False).tokens) == b"user: hi\n"


def test_texts_of_tokens_come_when_asked_for() -> None:
    assert encoded(prompt="é", return_token_strs=True).token_strs == ("\ufffd", "\ufffd")


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": ()}, {"messages": ()}])
def test_exactly_one_prompt_is_needed(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        encoded(**fields)
    assert not isinstance(refused.value, ContextLengthExceeded)


@pytest.mark.parametrize("token", [-1, 257, 2**63])
def test_what_is_no_token_is_refused(token: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decoded(97, token)
    assert refused.value.param == "tokens"


def test_no_tokens_are_no_text_and_special_ones_are_shown() -> None:
    assert decoded() == ""
    assert decoded(97, 256) == "a<end>"


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        decoded(1, model="other")

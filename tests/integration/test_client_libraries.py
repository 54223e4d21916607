"""Libraries that people put before an OpenAI endpoint, unmodified, against a whole deployment with the real model."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

REASON = "the extra 'clients' is not installed"
QUESTION = "What is the capital of France? Answer in one sentence."


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


class City(BaseModel):
    """A city, with nothing else said about it."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    is_big: bool


def langchain(deployment: Any, **options: Any) -> Any:
    module = pytest.importorskip("langchain_openai", reason=REASON)
    defaults = {"model": "smol", "api_key": "none", "temperature": 0, "max_tokens": 60, "max_retries": 0}
    return module.ChatOpenAI(base_url=f"{deployment.http_url}/v1", **{**defaults, **options})


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_invokes_streams_and_calls_tools(deployment: Any, use_responses_api: bool) -> None:
    model = langchain(deployment, use_responses_api=use_responses_api)
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.text
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == answer.text
    assert answer.usage_metadata["total_tokens"] > answer.usage_metadata["output_tokens"] > 0
    calling = model.bind_tools([GetWeather], tool_choice="any", parallel_tool_calls=False)
    called = calling.invoke("What is the weather in Paris?")
    [call] = called.tool_calls
    GetWeather.model_validate(call["args"])
    chunks = list(calling.stream("What is the weather in Paris?"))
    streamed = sum(chunks[1:], chunks[0])
    assert [one["args"] for one in streamed.tool_calls] == [call["args"]]
    messages = pytest.importorskip("langchain_core.messages", reason=REASON)
    result = messages.ToolMessage("sunny, 20 degrees", tool_call_id=call["id"])
    after = model.invoke([messages.HumanMessage("What is the weather in Paris?"), called, result])
    assert after.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(deployment: Any, method: str) -> None:
    model = langchain(deployment, max_tokens=100).with_structured_output(City, method=method)
    assert isinstance(model.invoke(QUESTION), City)


def test_langchain_raises_the_clients_errors(deployment: Any) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.NotFoundError):
        langchain(deployment, model="other").invoke(QUESTION)


def test_llm_prompts_streams_and_follows_a_schema(deployment: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    models = pytest.importorskip("llm.default_plugins.openai_models", reason=REASON)
    model = models.Chat("toad", model_name="smol", api_base=f"{deployment.http_url}/v1", supports_schema=True)
    options: Any = {"key": "none", "temperature": 0, "max_tokens": 100}
    answer = model.prompt(QUESTION, stream=False, **options).text()
    assert "Paris" in answer
    pieces = list(model.prompt(QUESTION, stream=True, **options))
    assert len(pieces) > 1
    assert "".join(pieces) == answer
    City.model_validate_json(model.prompt(QUESTION, schema=City, stream=False, **options).text())

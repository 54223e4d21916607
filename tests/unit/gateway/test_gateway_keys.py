"""API keys: who may come in, in which shape others are refused, and keys that change while we run."""

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from schemas.errors import Unauthenticated
from services.gateway.api_keys import ApiKeys
from services.gateway.app import build_app
from services.gateway.service import BusPipeline, api_keys_of
from services.gateway.settings import GatewaySettings, Settings
from services.runtime.bus import Bus
from services.runtime.registry import Registry
from services.runtime.telemetry import Tracing
from tests.scripted_tokenizer import ScriptedTokenizer
from tests.unit.gateway.gateway_traffic import CHAT, HELLO

Client = Callable[..., httpx.AsyncClient]


@pytest.fixture
def client(memory_bus: Bus, registry: Registry, tokenizer: ScriptedTokenizer, tracing: Tracing) -> Client:
    def make(keys: ApiKeys | None = None, **gateway: object) -> httpx.AsyncClient:
        settings = Settings(gateway=GatewaySettings.model_validate(gateway))
        app = build_app(BusPipeline(memory_bus, registry, "smol", 1.0), settings, tracing, "1", keys=keys)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")

    return make


def accepts(keys: ApiKeys, key: str) -> bool:
    try:
        keys.check(f"Bearer {key}", None)
    except Unauthenticated:
        return False
    return True


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": "Basic c2VjcmV0"},
        {"authorization": "secret"},
        {"x-api-key": "wrong"},
    ],
)
async def test_without_a_valid_key_there_is_a_401_in_the_standard_shape(
    client: Client, headers: dict[str, str]
) -> None:
    async with client(ApiKeys(["secret"])) as http:
        posted = await http.post(CHAT, json=HELLO, headers=headers)
        for response in (posted, await http.get("/v1/models", headers=headers)):
            assert response.status_code == 401
            error = response.json()["error"]
            assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
            assert response.headers["www-authenticate"] == "Bearer"
            assert "wrong" not in response.text


async def test_a_valid_key_opens_and_probes_need_none(client: Client) -> None:
    async with client(ApiKeys(["other", "secret"])) as http:
        assert (await http.get("/v1/models", headers={"authorization": "bearer secret"})).status_code == 200
        assert (await http.get("/v1/models", headers={"x-api-key": "secret"})).status_code == 200
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200


async def test_without_configured_keys_everybody_may_come_in(client: Client) -> None:
    async with client() as http:
        assert (await http.get("/v1/models", headers={"authorization": "Bearer any"})).status_code == 200


def test_keys_in_a_file_change_while_we_run(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n")
    keys = ApiKeys(file=file)
    keys.load()
    assert accepts(keys, "first")
    file.write_text("second\n")
    os.utime(file, ns=(1, 1))
    assert not accepts(keys, "first")
    assert accepts(keys, "second")
    file.unlink()
    assert accepts(keys, "second")  # the last known ones stay valid
    file.write_text("")
    assert not accepts(keys, "second")
    assert not accepts(keys, "")
    assert keys.is_required


def test_keys_come_from_the_settings() -> None:
    keys = api_keys_of(GatewaySettings(api_keys="one, two,,"))
    assert [accepts(keys, key) for key in ("one", "two", "", "one, two,,")] == [True, True, False, False]
    assert not api_keys_of(GatewaySettings()).is_required


async def test_web_pages_of_configured_origins_may_call(client: Client) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with client(ApiKeys(["secret"]), cors_origins=("https://page.example",)) as http:
        preflight = await http.options(CHAT, headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        refused = await http.get("/v1/models", headers={"origin": "https://page.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        foreign = await http.get("/health", headers={"origin": "https://else.example"})
        assert "access-control-allow-origin" not in foreign.headers
    async with client() as http:
        assert (await http.options(CHAT, headers=asks)).status_code == 405

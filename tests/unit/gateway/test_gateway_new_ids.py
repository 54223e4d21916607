"""Only an id that the gateway made up itself is said to be new: for any other, the output log is asked first."""

import httpx
import pytest

from tests.scripted_tokenizer import ScriptedTokenizer
from tests.unit.gateway.gateway_traffic import CHAT, COMPLETIONS, HELLO


async def test_an_id_of_our_own_is_new(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    await http.post(CHAT, json=HELLO)
    await http.post(COMPLETIONS, json={"prompt": ["a", "b"]})
    assert [request.is_new_id for request in tokenizer.requests] == [True, True, True]


@pytest.mark.parametrize("said", [{}, {"is_new_id": True}])
async def test_a_clients_id_may_be_old_whatever_it_says(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer, said: dict[str, bool]
) -> None:
    await http.post(CHAT, json={**HELLO, "request_id": "mine", **said})
    await http.post(CHAT, json={**HELLO, **said}, headers={"Idempotency-Key": "key"})
    assert [request.is_new_id for request in tokenizer.requests] == [False, False]

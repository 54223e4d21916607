"""Our quick reading of a message's headers says what the NATS client's own does."""

import pytest
from nats.aio.client import Client

from services.runtime.nats_connection import QuickClient

BLOCKS = {
    "ours": b"Nj-Schema: step_plan/1\r\ntraceparent: 00-ab-cd-01\r\nNats-Sequence: 7\r\n\r\n",
    "without and with several spaces": b"A:1\r\nB:  two words \t\r\n\tC : x\r\n\r\n",
    "a colon, nothing, the same name twice": b"A: b:c\r\nEmpty:\r\nA: last\r\n\r\n",
    "no header at all": b"\r\n\r\nnonsense\r\n",
    "names that are none": b"two words: x\r\nN\xc3\xa4me: x\r\n\xff: x\r\nGood: y\r\n\r\n",
    "values beyond ASCII": b"A: \xc3\xa4\xe2\x82\xac\r\nB: \xff\xfe\r\nC: \xc2\xa0kept\xc2\xa0\r\n\r\n",
    "line ends of other kinds": b"A: one\nB: two\r\nC: three\rD: four\r\n\r\n",
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_headers_read_as_the_client_reads_them(block: bytes) -> None:
    assert QuickClient._parse_header_lines(block) == Client._parse_header_lines(block)


def test_the_client_still_asks_for_headers_to_be_read_there() -> None:
    assert "_parse_header_lines" in vars(Client)

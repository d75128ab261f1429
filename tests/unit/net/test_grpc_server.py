"""What a process that members dial reads of questions and of the ends of calls."""

import grpc
import pytest

from coterie.net.grpc_server import parse_fields, read_error
from coterie.net.outbox import Missing
from coterie.net.payload import Refused


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ('{"code":"gone","round":7}', Missing("gone", 7)),
        ('{"code":"gone","round":true}', Missing("gone", None)),
        ('{"code":"gone","round":' + "9" * 900 + "}", Missing("gone", None)),
        ('{"code":"withheld","round":-3}', Missing("withheld", None)),
    ],
)
def test_reasons_are_read_strictly(details, expected):
    error = grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, (), (), details)
    assert read_error(error) == expected


@pytest.mark.parametrize(
    "details",
    ['{"code":"x\\ny","round":1}', "[1]", "no JSON\n", '{"code":"gone","code":"gone"}', ""],
)
def test_other_words_of_a_peer_are_no_reason_and_can_be_printed(details):
    error = grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, (), (), details)
    found = read_error(error)
    assert found.reason == "unreachable"
    assert found.text.isprintable()


@pytest.mark.parametrize(
    ("body", "fine"),
    [
        (b'{"run":"r","wait":1.5}', True),
        (b'{"run":"r","wait":1}', True),
        (b'{"run":"r","wait":true}', False),
        (b'{"run":"r","wait":1e999}', False),
        (b'{"run":"r","wait":-2}', False),
        (b'{"run":1,"wait":1}', False),
        (b'{"run":"r"}', False),
        (b'{"run":"r","wait":1,"more":1}', False),
        (b'{"run":"r","wait":1' + b" " * 1024 + b"}", False),
        (b'{"run":"r","wait":' + b"9" * 900 + b"}", False),
    ],
)
def test_a_question_has_its_fields_and_no_others(body, fine):
    def parse():
        return parse_fields(body, {"run": str, "wait": float})

    if fine:
        assert set(parse()) == {"run", "wait"}
    else:
        with pytest.raises(Refused):
            parse()

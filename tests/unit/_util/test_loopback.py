import pytest

from coterie._util.loopback import is_local_request


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:80", True),
        ("localhost:80", True),
        ("127.0.0.1:81", False),
        ("127.0.0.1", False),
        ("localhost.evil.example:80", False),
        ("", False),
    ],
)
def test_a_request_is_ours_if_it_names_this_machine_and_the_port(host, expected):
    assert is_local_request(host, 80) is expected

import pytest

from coterie.net.fleet import Fleet

LINES = 'for i in 1 2 3 4 5; do echo "{\\"event\\": \\"round\\", \\"round\\": $i}" >&2 || exit 1; sleep 0.1; done'


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_listener_ends_no_node(tmp_path):
    """The log of the process is read and kept to its end: a closed pipe would be its end as well."""

    def listener(name, event):
        raise RuntimeError("a fault of the listener")

    files, behind = {"a": tmp_path / "node.toml"}, {"a": ["sh", "-c", LINES]}
    with Fleet(files, logs=tmp_path, listener=listener, behind=behind) as one:
        one.start("a")
        assert one.wait(30) == {"a": 0}
    assert len((tmp_path / "a.log").read_text().splitlines()) == 5

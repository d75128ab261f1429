"""The engine's lines become events: who was turned away, why, how often; nobody fills the log from outside."""

import io

import pytest

from coterie.net.engine_log import EngineLog

HEAD = "2026-11-21T09:06:05.330840Z {level} {thread} ThreadId({number:02}) "
ACCESS = "zenoh::net::routing::interceptor::access_control: "
MEMBER = "d109 on Interface(lo)+CertCommonName(n2)+Transport(Tls)+d109 is "
HINT = ". Hint: increase the system open file limit."
DROPPED = "zenoh::net::routing::interceptor: Msg intercepted!"


def line(text: str, level: str = "TRACE", number: int = 10) -> str:
    return HEAD.format(level=level, thread=" rx-0", number=number) + text + "\n"


class Heard:
    """An EngineLog, the events it told, and what it passed on; time stands still unless it is moved."""

    def __init__(self, **options) -> None:
        self.events: list[tuple] = []
        self.out, self.now = io.StringIO(), 100.0
        self.log = EngineLog(
            self.tell, options.pop("out", self.out), clock=lambda: self.now, **options
        )

    def tell(
        self, event: str, *, level: str, reason: str, text: str, times: int, peer: str = ""
    ) -> None:
        assert (event, level) == ("turned_away", "warning")
        self.events.append((reason, peer, text, times))

    def hear(self, *lines: str) -> list[tuple]:
        for text in lines:
            self.log.take_line(text)
        told, self.events = self.events, []
        return told


def test_a_handshake_that_failed_is_told_without_the_engines_hint():
    heard = Heard()
    text = f"zenoh_link_tls::unicast: invalid peer certificate: UnknownIssuer{HINT}"
    assert heard.hear(line(text, "WARN")) == [
        ("certificate", "", "invalid peer certificate: UnknownIssuer", 1)
    ]
    assert heard.out.getvalue() == line(text, "WARN"), (
        "what is a warning goes on to standard output"
    )


def test_a_member_that_was_denied_a_key_is_named():
    heard = Heard()
    assert heard.hear(
        line(f"{ACCESS}{MEMBER}unauthorized to Query (ingress) on coterie/1/r/n0/model/n1"),
        line(DROPPED),
    ) == [("not_allowed", "n2", "Query on coterie/1/r/n0/model/n1", 1)]
    cached = "Using cached result: d109 is unauthorized to Liveliness Token (ingress) on coterie/1/r/n1/alive"
    assert heard.hear(line(f"{ACCESS}{cached}"), line(DROPPED)) == [
        ("not_allowed", "n2", "Liveliness Token on coterie/1/r/n1/alive", 1)
    ], "by the name that its session had before"
    assert heard.out.getvalue() == "", "what the engine traces goes no further"


def test_rulings_in_advance_and_of_other_threads_are_not_of_a_message():
    """The engine rules on every kind of message when it first hears of a key; a message over its cap follows."""
    heard = Heard()
    assert heard.hear(
        line(f"{ACCESS}ACL (ingress): caching permissions for `coterie/1/r/n2` ..."),
        line(f"{ACCESS}{MEMBER}unauthorized to Put (ingress) on coterie/1/r/n2"),
        line(
            f"{ACCESS}Using cached result: d109 is authorized to Reply (ingress) on coterie/1/r/n2"
        ),
        line(
            f"{ACCESS}{MEMBER}unauthorized to Query (ingress) on coterie/1/r/n0/model/n1", number=11
        ),
        line(DROPPED),
    ) == [("too_large", "n2", "a question or an answer is over its cap", 1)]


def test_a_message_that_was_allowed_and_is_dropped_all_the_same_is_too_large():
    heard = Heard()
    rulings = [
        line(f"{ACCESS}{MEMBER}{word} to Query (ingress) on coterie/1/r/n0/head/n{n}")
        for n, word in ((1, "unauthorized"), (2, "authorized"))
    ]
    assert [reason for reason, *_ in heard.hear(*rulings, line(DROPPED))] == ["too_large"]


def test_what_the_own_access_list_keeps_from_going_out_accuses_nobody():
    """The engine offers a question to every peer whose announcements have not come; the list keeps it from them."""
    heard = Heard()
    denied = f"{ACCESS}{MEMBER}unauthorized to Query (egress) on coterie/1/r/n1/head/n0"
    allowed = f"{ACCESS}{MEMBER}authorized to Query (ingress) on coterie/1/r/n0/head/n2"
    assert heard.hear(line(denied), line(DROPPED)) == []
    assert heard.hear(line(allowed), line(denied), line(DROPPED)) == []
    assert heard.hear(line(DROPPED)) == [], (
        "an answer for a link that is gone: it has no key any more"
    )
    assert heard.log.times.total() == 0


def test_a_member_is_named_as_the_roster_does_when_it_is_told():
    """The rulings of a session begin before the node knows the roster's names of its peers."""
    heard = Heard()
    denied = [
        line(f"{ACCESS}{MEMBER}unauthorized to Query (ingress) on coterie/1/r/n0/model/n1"),
        line(DROPPED),
    ]
    heard.log.name_of = lambda common: {"n2": "site-2"}[common]
    assert [peer for _, peer, *_ in heard.hear(*denied)] == ["site-2"]


UNKNOWN = line(
    f"{ACCESS}22fa did not match any configured ACL subject. Default permission `Deny` will be applied on all messages",
    "INFO",
)


def links(text: str, number: int = 10) -> str:
    inside = f"Transport Unicast {{ zid: 22fa, whatami: Peer, is_qos: true, is_shm: false, links: [{text}] }}"
    source = "zenoh::net::routing::interceptor::low_pass: New low-pass filter transport unicast "
    return line(source + inside, "DEBUG", number)


LINK = (
    "Link { src: tls/127.0.0.1:24100, dst: tls/127.0.0.1:33900, group: None, mtu: 50688, is_streamed: true, "
    'interfaces: ["lo"], auth_identifier: Tls(Some("0bd5")), priorities: None, reliability: None }'
)


@pytest.mark.parametrize(
    ("after", "who"),
    [(links(LINK), " (from 127.0.0.1:33900, common name 0bd5)"), (line("zenoh::net: another"), "")],
)
def test_somebody_who_is_not_on_the_roster_is_told_at_the_link_and_then_makes_drops_ambiguous(
    after, who
):
    heard = Heard()
    text = f"its certificate is valid; nothing that it sends is read{who}"
    assert heard.hear(UNKNOWN, after) == [("not_on_roster", "", text, 1)]
    assert [reason for reason, *_ in heard.hear(line(DROPPED))] == ["dropped"]


def test_a_link_that_is_closed_before_its_certificate_is_seen_is_no_stranger():
    heard = Heard()
    assert heard.hear(UNKNOWN, links(LINK, number=11), links(""), line(DROPPED)) == []
    gone = "zenoh::net::routing::interceptor::low_pass: Unable to get links from transport Transport closed: closed"
    assert heard.hear(UNKNOWN, line(gone, "ERROR"), line(DROPPED)) == []
    heard.log.close()
    assert heard.events == []


def test_somebody_of_whom_the_engine_says_no_more_is_told_at_the_end():
    heard = Heard()
    assert heard.hear(UNKNOWN) == []
    heard.log.close()
    assert [reason for reason, *_ in heard.events] == ["not_on_roster"]


def test_what_comes_again_is_counted_and_told_every_ten_seconds_and_at_the_end():
    heard = Heard()
    expired = [
        line(f"zenoh_link_tls::unicast: expired: {second} s ago{HINT}", "WARN")
        for second in range(5)
    ]
    assert [times for *_, times in heard.hear(*expired[:3])] == [1]
    heard.now += 10
    assert heard.hear(expired[3]) == [("certificate", "", "expired: 3 s ago", 3)]
    heard.hear(expired[4])
    heard.log.close()
    assert heard.events == [("certificate", "", "expired: 4 s ago", 1)]
    assert [(labels, number) for _, _, labels, number in heard.log.prometheus_samples()] == [
        ({"reason": "certificate"}, 5)
    ]


def test_ten_thousand_different_refusals_leave_few_events():
    heard = Heard()
    names = ["".join("abcdefghij"[int(digit)] for digit in str(number)) for number in range(10_000)]
    told = heard.hear(
        *(text for name in names for text in (
            line(f"{ACCESS}{MEMBER}unauthorized to Query (ingress) on coterie/1/r/n0/{name}/n1"), line(DROPPED)
        ))
    )  # fmt: skip
    assert len(told) == 65
    assert heard.log.times["not_allowed"] == 10_000


@pytest.mark.parametrize("everything", [False, True])
def test_lines_go_on_to_standard_output_those_for_debugging_only_when_asked_for(everything):
    heard = Heard(everything=everything)
    lines = [
        "of another program\n",
        line("zenoh::net: careful", "WARN"),
        line("zenoh::net: by the way", "DEBUG"),
    ]
    assert heard.hear(*lines) == []
    assert heard.out.getvalue() == "".join(lines if everything else lines[:2])


def test_a_standard_output_that_nobody_reads_stops_nothing():
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    heard = Heard(out=Closed())
    assert len(heard.hear(line("zenoh_link_tls::unicast: bad", "WARN"))) == 1

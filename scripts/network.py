"""Write docs/reference/network.md: measurements of the network that benchmarks/network.py stores.

    python benchmarks/network.py parity       (or another measurement; each writes its JSON into
                                              docs/reference/runs)
    python scripts/network.py                 (`--check` only compares the page)

No number of the page is typed.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from _pages import REFERENCE, STORED, markdown, table, write
from performance import exchanges
from stored import told

HEAD = """<!-- made by scripts/network.py; do not edit -->
# The network, measured

Nodes are processes with certificates and mutual TLS, as in
[the deployment](../how-to/deploy-in-three-hospitals.md). See also [the wire format](wire.md) and [the threat
model](../explanation/threat-model.md). Results that name zenoh were measured with the transport before gRPC ([decision
035](../decisions/035-grpc.md)): they say nothing of speed, floods or memory with gRPC.
"""
Results = list[dict[str, Any]]


def yes(value: bool) -> str:
    """Return a truth value as a word."""
    return "yes" if value else "NO"


def number(value: float) -> str:
    """Return a difference: 0 exactly, or with its size."""
    return "0" if value == 0 else f"{value:.1e}"


def range_of(values: Sequence[float], unit: str = "") -> str:
    """Return the least and the largest of some values."""
    return f"{min(values):g} to {max(values):g}{unit}"


def parity(found: Results) -> str:
    """Return the part on nodes and simulation."""
    first = found[0]
    return (
        f"{first['nodes']} nodes as processes, {first['rounds']} rounds, compared with the simulation with the same "
        "seed and engine: the peers of every round, weights, bytes and metrics, and the largest difference of a "
        "parameter at the end.\n\n" + compare_methods(found)
    )


def behind(found: Results) -> str:
    """Return the part on members that only dial out, by a proxy."""
    first = found[0]
    return (
        f"As above, between {first['nodes']} members of which {first['only dial out']} accept no connection: all dial by "
        "one HTTP proxy, and reach each other by one relay.\n\n" + compare_methods(found)
    )


def compare_methods(found: Results) -> str:
    """Return a table of methods whose nodes were compared with the simulation."""
    head = (
        "method",
        "same peers in every round",
        "same weights, bytes and metrics",
        "largest difference",
    )
    rows = []
    for r in found:
        same = yes(r["same_edges"] and r["same_metrics"])
        rows.append((r["method"], yes(r["same_peers"]), same, number(r["largest_difference"])))
    return table(head, rows)


def replay(found: Results) -> str:
    """Return the part on replays."""
    rows = [
        (
            r["method"],
            r["rounds"],
            r["killed_and_restarted"],
            r["pulls_with_missing_peers"],
            number(r["largest_difference"]),
        )
        for r in found
    ]
    head = (
        "method",
        "rounds",
        "killed -9 and restarted",
        "pulls with missing peers",
        "largest difference",
    )
    return (
        f"{found[0]['nodes']} nodes, one of which is killed without warning and started again. The simulator then "
        "replays the same rounds from the nodes' journals of received messages.\n\n"
        + table(head, rows)
    )


# What the exit statuses of nodes mean.
STATUSES = {
    3: "3 (rounds without a message)",
    5: "5 (too few others)",
    None: "none (still there 20 minutes later)",
}


def lived_through(found: Results) -> str:
    """Return the part on churn or on a partition."""
    events, result = found[:-1], found[-1]
    harmed = {*result.get("killed", ()), result.get("cut_off")}
    whole = [n for n in result["rounds_finished"] if n not in harmed]
    finished = {result["rounds_finished"][n] for n in whole}
    grown = list(result["memory_growth_mb"].values())
    unharmed = result["unharmed_accuracy"]
    rows: list[tuple[str, object]] = [
        ("undisturbed nodes", len(whole)),
        ("rounds that each of them finished", f"{range_of(sorted(finished))} of {result['rounds']}"),
        ("longest exchange in one of their rounds",
         f"{result['longest_exchange_s']:g} s; deadline {result['deadline_s']:g} s"),
        ("growth of their memory, second to last quarter of the run", range_of(grown, " MB")),
        ("exit status of all nodes but those killed for good",
         ", ".join(sorted({STATUSES.get(s, str(s)) for s in result["statuses"].values()}))),
        ("test accuracy of all nodes that finished", f"{result['accuracy']:.2f} %"),
        (f"the same clients in {len(unharmed)} undisturbed runs (seeds)",
         f"{min(unharmed):.2f} to {max(unharmed):.2f} %, mean {statistics.mean(unharmed):.2f} %"),
        ("replay from the journals, largest difference", number(result["replay_difference"])),
    ]  # fmt: skip
    if "rounds_apart" in result:
        rows.append(
            (
                "rounds without a model across the partition",
                "{} to {}".format(*result["rounds_apart"]),
            )
        )
        rows.append(("models across it afterwards", result["reads_across_after"]))
    timeline = "; ".join(f"{e['event']} ({e['at']:g} s)" for e in events)
    return (
        f"{result['nodes']} nodes with {result['method']}, {result['rounds']} rounds, each in a network namespace of "
        f"its own. Events, in seconds after the third round: {timeline}.\n\n"
        + table(("", "found"), rows)
    )


def troubled(found: Results) -> str:
    """Return the part on nodes with troubles of all kinds."""
    r, others = found[-1], found[-1]["others"]
    rows = [
        (t["node"], t["what"], "–" if t["first"] is None else t["first"],
         "–" if t["last"] is None else STATUSES.get(t["last"], t["last"]), t["rounds"], t["named_slow"])
        for t in r["troubles"]
    ]  # fmt: skip
    rest = ", ".join(str(STATUSES.get(s, s)) for s in others["statuses"])
    rounds = range_of(others["rounds"])
    rows.append(("the others", "none", "–", rest, rounds, others["named_slow"]))
    head = ("node", "its trouble", "exit status then", "exit status at the end", f"rounds done of {r['rounds']}",
            "times that the others named it slow")  # fmt: skip
    told = "; ".join(f"{what}: {times}" for what, times in others["warnings"].items())
    timeline = "; ".join(f"{e['event']} ({e['at']:g} s)" for e in found[:-1])
    return (
        f"{r['nodes']} nodes with dac, {r['rounds']} rounds. Every connection goes through a relay that delays each "
        f"direction by {r['delay_s']:g} s. Events, in seconds after the third round: {timeline}.\n\n"
        + table(head, rows)
        + f"\n\nA round of the others took {r['median_round_s']:g} s (median) and at most {r['longest_round_s']:g} s; "
        f"their warnings: {told}. Test accuracy of all nodes that finished: {r['accuracy']:.2f} %. Replay "
        f"from the journals, largest difference: {number(r['replay_difference'])}."
    )


def soak(found: Results) -> str:
    """Return the part on a long run."""
    first, rows = found[0], []
    for r in found:
        looks = {at: memory for at, memory in r["looks"]}
        middle = min(looks, key=lambda at: abs(at - r["watched_from"]))
        rows.append((r["method"], r["node"], looks[-1], looks[middle], looks[max(looks)],
                     f"{r['slope_mb_per_100_rounds']:+.2f}",
                     *("{} to {}".format(*r[what]) for what in ("threads", "open_files"))))  # fmt: skip
    head = ("method", "node", "MB at the start", f"in round {first['watched_from']}", f"in round {first['rounds']}",
            "MB per 100 rounds", "threads", "open files")  # fmt: skip
    worst = max(r["slope_mb_per_100_rounds"] for r in found)
    return (
        f"Three nodes, {first['rounds']:,} rounds of a small model, each node measured after every round. In the first "
        f"{first['watched_from']} rounds the memory of libraries and allocators fills up. "
        f"After them resident memory grows by at most {worst:.2f} MB per 100 rounds (least-squares fit; a node also "
        "keeps the tables of its own run, some hundred bytes a round). Threads and open files are those of the same "
        "rounds.\n\n" + table(head, rows)
    )


def slow(found: Results) -> str:
    """Return the part on a slow link."""
    first = found[0]
    times = [t for r in found for t in r["seconds"]]
    return (
        f"Two nodes send each other a model of {first['model_bytes'] / 1e6:g} MB over links of {first['mbit_per_s']:g} "
        f"Mbit/s (tc tbf, one namespace each), with default settings (deadline {first['deadline_s']:g} s): every model "
        f"arrived, in {range_of(times, ' s')}; at the rate of the line alone it takes {first['line_rate_s']:g} s."
    )


def paced(found: Results) -> str:
    """Return the part on one slow member."""
    first = found[0]
    rows = [
        (r["what"], r["rounds"], f"{r['ms_a_round']:g}", f"{r['longest_exchange_s']:g}",
         f"{r['warnings_that_name_it']} of {r['warnings']}",
         "; ".join(f"{who}: {times}" for who, times in r["slow"].items()) or "nobody")
        for r in found
    ]  # fmt: skip
    head = ("what the last member does", "rounds", "ms a round of the others", "their longest exchange, s",
            "warnings that name it", "named slow")  # fmt: skip
    alone, slowed = (
        range_of([r["ms_a_round"] for r in found if r["kind"] == kind], " ms")
        for kind in ("none", "drip")
    )
    return (
        f"{first['nodes']} nodes inside one program, mutual TLS, default settings; rounds from number {first['after']} "
        f"on. With the member that answers at 0.95 of the wait a round takes the others {slowed}, without it {alone}. "
        "Both were run twice, in turn. "
        "The late client is one of a server's.\n\n" + table(head, rows)
    )


def unhurried(found: Results) -> str:
    """Return the part on nodes that wait for nobody."""
    first = found[0]
    rows = [
        (r["slow"], f"{r['s_a_round']:.3f}", f"{r['slowest_s_a_round']:.3f}",
         range_of(r["s_a_round_of_the_slow"], "") if r["slow"] else "–", f"{r['missing']} of {r['read'] + r['missing']}",
         f"{r['mean_age']:g}", r["oldest"], f"{r['equal_to_the_byte']} of {r['nodes']}", f"{r['replay_s']:g}")
        for r in found
    ]  # fmt: skip
    head = ("slow members", "s a round of the others, median", "of the slowest of them", "of the slow ones",
            "reads without a message", "mean age", "oldest", "members repeated to the byte", "s of the repetition")  # fmt: skip
    alike = [r["s_a_round"] for r in found if not r["slow"]]
    changes = []
    for r in found:
        changes += [f"{100 * (r['s_a_round'] / each - 1):+.1f} %" for each in alike if r["slow"]]
    return (
        f'{first["nodes"]} nodes as processes with `pace = "free"`, mutual TLS, DAC. A training takes {first["training_s"]:g} s '
        f"(with a pause in it), that of a slow member {first['times']} times as long; rounds from number {first['after']} on. "
        f"Compared with each of the runs without slow members, in turn, a round takes the others {' and '.join(changes)} longer. "
        "Ages are in rounds of the reader.\n\n" + table(head, rows)
    )


def waited(found: Results) -> str:
    """Return the part on a node that waits for many."""
    (r,) = found
    parts = ", ".join(
        f"{share:g} % until {end:g} s"
        for share, end in zip(r["percent_of_a_core"], r["parts"], strict=True)
    )
    return (
        f"A node waits for the {r['members'] - 1} other members of its roster, and none of them is there. It takes "
        f"{r['percent_in_all']:g} % of a core in the first {r['seconds']:g} s ({parts})."
    )


def met(found: Results) -> str:
    """Return the part on meeting."""
    seconds = [r["seconds"] for r in found]
    return (
        f"{found[0]['meet']} nodes inside one program start together, with mutual TLS: each has the signed head of at "
        f"least {min(r['least_met'] for r in found)} others after {range_of(seconds, ' s')} "
        f"({range_of([r['processor_s'] for r in found], ' s')} of processor time, all nodes together)."
    )


def held(found: Results) -> str:
    """Return the part on large rosters."""
    head = ("members", "file, MB", "read in, s", "kept, MB", "while it is read, MB")
    rows = []
    for r in found:
        size = round(r["file_bytes"] / 1e6, 2)
        rows.append((f"{r['members']:,}", size, r["load_s"], r["kept_mb"], r["while_loading_mb"]))
    return (
        "A process reads a signed roster, checks it, and makes of it what a node keeps: entries by name and key, members by client. "
        "Rosters have [up to 10,000 members](../decisions/044-peer-sampling.md); for the measurement that bound was raised. Memory is "
        "resident, above that of the process before.\n\n" + table(head, rows)
    )


def inside(found: Results) -> str:
    """Return the part on many nodes in one program."""
    (one,) = found
    return (
        f"{one['inside']} nodes of a client each run DAC inside one program, without sockets: they are made in "
        f"{one['build_s']:.0f} s, have met {one['meet_s']:.0f} s later, and have done the warm-up and {one['rounds']} "
        f"rounds after {one['run_s']:.0f} s more. The models of {one['equal']} are those of the simulation to the byte."
    )


def few_of_many(found: Results) -> str:
    """Return the part on a large roster of which few run."""
    (one,) = found

    def spread(name: str, unit: str = "") -> str:
        least, _, most = one[name]
        return f"{least:g} to {most:g}{unit}" if least < most else f"{most:g}{unit}"

    return (
        f"A roster of {one['views']:,} members ({one['roster_mb']:g} MB, read in {one['load_s']:g} s), of which {one['running']} "
        f"run, each as a process with mutual TLS: DAC with a table and views of {one['view']}, of which {one['shuffle']} "
        f"change in a round, {one['rounds']} rounds. They end after {spread('seconds', ' s')} each. The models of all "
        f"{one['equal_to_replay']} are to the byte those of the simulator, which repeats the run from their journals. Each node "
        f"knows {spread('found')} others in the end, has {spread('alone')} rounds alone and {spread('skipped')} left out, takes "
        f"{spread('processor_s', ' s')} of processor time and {spread('resident_mb', ' MB')} of memory at most, with what it shares "
        f"with the process that started all. It has dialed at most {spread('dialed')} connections at a time, and "
        f"at most {spread('accepted')} of others were open; {spread('asked_in_vain')} members that do not run were asked in vain."
    )


def hour(found: Results) -> str:
    """Return the part on nodes that run for a given time."""
    rows = [
        (r["node"], r["rounds"], f"{r['mb_per_hour_second_half']:+.2f}", range_of(r["range_mb"]),
         *("{} to {}".format(*r[what]) for what in ("threads", "open_files")), r["log_bytes_a_round"], r["warnings"],
         r["status"])
        for r in found
    ]  # fmt: skip
    head = ("node", "rounds", "MB an hour", "MB", "threads", "open files", "bytes of logs a round", "warnings",
            "exit status")  # fmt: skip
    return (
        f"Three nodes run for {found[0]['minutes']:g} minutes at the lowest priority, and SIGTERM ends them (143). "
        "Memory, threads, open files and bytes of log, journal and audit log are those of the second half.\n\n"
        + table(head, rows)
    )


def fuzz(found: Results) -> str:
    """Return the part on damaged messages."""
    (r,) = found
    rows = [(f"answer refused: {k.removeprefix('refused:')}", v) for k, v in r["refused"].items()]
    rows.append(
        ("answer accepted, because the damage left a valid message", r["read_all_the_same"])
    )
    rows += [(f"question ended: {k}", v) for k, v in r["questions_ended"].items()]
    memory = r["memory_mb"]
    return (
        f"A member with a valid certificate sends {r['messages']:,} damaged messages to a node with mutual TLS: "
        f"{r['answers']:,} answers to its questions (half of them properly signed), {r['questions']:,} questions, "
        f"{r['heads']:,} heads. Nothing crashed; in all {r['honest_exchanges']} exchanges with an honest peer in "
        f"between everything arrived; memory went from {memory['start']:g} to {memory['end']:g} MB (growth between the "
        f"first and the last five measurements after the start: {r['memory_growth_mb']:g} MB).\n\n"
        + table(("what", "times"), rows)
    )


def attacked(found: Results) -> str:
    """Return the part on attacks by a member."""

    def both(values: Sequence[object]) -> str:
        return ", ".join(str(value) for value in values)

    rows = []
    for r in found:
        ended = (
            "done"
            if all(r["done"]) and not any(r["statuses"])
            else f"exit status {both(r['statuses'])}"
        )
        parts = ("rounds", "mixed", "refused", "validation", "test")
        numbers = [both(r[what]) if what in r else "–" for what in parts]
        said = "; ".join(f"{what} ({times})" for what, times in r["events"].items()) or "nothing"
        rows.append((r["attack"], r["what"], ended, *numbers, said))
    head = ("attack", "what the member does", "the honest end with", "rounds trained", "rounds that mixed its model",
            "that tried and refused it", "validation accuracy, %", "test accuracy, %", "warnings logged")  # fmt: skip
    first, method = (
        found[0],
        sorted({r["method"] for r in found if r["attack"].startswith("server")}),
    )
    served = f"; where it has the server role, {', '.join(method)}" if method else ""
    return (
        f"Two honest nodes and a member that attacks, over mutual TLS, with {first['method']}{served}, "
        f"{first['of']} rounds of a linear model on the bundled digits. The member is a program written from "
        "[the wire format](wire.md) that imports nothing of Coterie, with valid credentials. Numbers are those of the "
        "two honest nodes. What two nodes reach without the third is in the line of the old key.\n\n"
        + table(head, rows)
    )


def alarms(found: Results) -> str:
    """Return the part on events that accuse somebody in an honest run."""
    (r,) = found
    told = "; ".join(f"{what}: {times}" for what, times in r["alarms"].items()) or "none"
    missing = "; ".join(f"{why}: {times}" for why, times in r["missing"].items()) or "none"
    return (
        f"{r['nodes']} honest nodes as processes, all started at once on the two cores, {r['rounds']} rounds of a "
        "linear model. Events that accuse somebody (turned away, refused, another study or roster): "
        f"{told}. Messages that did not come: {missing}. Every node finished "
        f"{range_of(r['rounds_finished'])} rounds; the longest exchange took {r['longest_exchange_s']:g} s "
        f"(deadline {r['deadline_s']:g} s)."
    )


def flooded(found: Results) -> str:
    """Return the part on connections that are held and floods."""
    rows = [
        (r["attack"].replace("_", " ") or "none", r["exchanges"], r["missed"], r["median_ms"], r["longest_s"],
         f"{r['joined_s']:g}" if r["joined_s"] is not None and r["joined_s"] < 60 else "over 60",
         r["memory_mb"][1] - r["memory_mb"][0], r["log_lines"])
        for r in found
    ]  # fmt: skip
    head = ("attack", "honest exchanges", "missed", "median, ms", "longest, s", "a new link came up after, s",
            "memory grew, MB", "lines in the log")  # fmt: skip
    return (
        f"Two honest nodes exchange models of 0.4 MB without a pause (deadline {found[0]['deadline_s']:g} s), and a "
        "third one joins 12 s after the attack began, while strangers hold connections or break handshakes, or a "
        "member with a valid certificate floods the first node (`benchmarks/floods.py`). Attackers and victims share "
        "the cores.\n\n" + table(head, rows)
    )


def renewed(found: Results) -> str:
    """Return the part on new keys and removals under load."""
    (r,) = found

    def words(table: dict[str, Any]) -> str:
        return "; ".join(f"{what}: {times}" for what, times in table.items()) or "none"

    rows: list[tuple[str, object]] = [
        ("exit status", words(r["statuses"])),
        ("rounds that each finished", words(r["rounds_finished"])),
        ("seconds until the others had the new key", range_of(r["seconds_to_take"]["rekeyed"])),
        ("seconds until the others had the removal", range_of(r["seconds_to_take"]["removed"])),
        (
            "longest exchange of the others",
            f"{r['longest_exchange_s']:g} s; deadline {r['deadline_s']:g} s",
        ),
        ("messages that did not come", words(r["missing"])),
        ("connections and messages turned away", words(r["turned_away"])),
        ("messages refused", r["refused"]),
    ]
    return (
        f"{r['nodes']} nodes as processes exchange a small model as fast as they can, {r['rounds']} rounds. At round "
        f"{r['rekeyed_at']} the organizer signs another key for one, which is started again with it; at round "
        f'{r["removed_at"]} another one is removed. "The others" are the remaining six.\n\n'
        + table(("", "found"), rows)
    )


def predicted(found: Results) -> str:
    """Return the part on predicted and counted bytes."""
    rows = [
        (r["method"], f"{r['predicted'] / 1e6:.3f}", f"{r['counted'] / 1e6:.3f}",
         f"{100 * (r['counted'] / r['predicted'] - 1):+.2f} %")
        for r in found
    ]  # fmt: skip
    return (
        f"Megabytes that {found[0]['nodes']} nodes received in {found[0]['rounds']} rounds, envelopes included: "
        "predicted from the settings (`coterie.results.traffic.predict_network_bytes`), and counted on the wire.\n\n"
        + table(("method", "predicted", "counted", "difference"), rows)
    )


def efficiency(found: Results) -> str:
    """Return the part on the time of a round's exchange, whose table stands on the page on performance too."""
    return (
        "Processes on loopback; nodes and raw TCP with mutual TLS alternate. The nodes' time includes signatures, "
        "digests and checks, their bytes the envelopes.\n\n" + markdown(exchanges(found))
    )


def relayed(found: Results) -> str:
    """Return the part on the time of a round's exchange by a relay."""
    first, names = found[0], {"direct": "direct links", "relay": "all by one relay"}
    rows, middle = [], {}
    for kind, name in names.items():
        runs = [r for r in found if r["kind"] == kind]
        middle[kind] = statistics.median(r["median_ms"] for r in runs)
        rows.append(
            (
                name,
                f"{middle[kind]:.0f}",
                ", ".join(f"{r['median_ms']:.0f}" for r in runs),
                f"{middle[kind] / middle['direct']:.2f}",
                f"{statistics.median(r['mb_a_second'] for r in runs):.0f}",
            )
        )
    head = ("", "ms a round", "its runs", "times direct", "MB a second that a node receives")
    return (
        f"{first['nodes']} processes on one machine, models of {first['model_bytes'] / 1e6:.0f} MB, {first['peers']} peers a round, "
        f"{first['rounds']} rounds after the first ones, in turn. The relay shares the cores with the nodes, and every byte passes it.\n\n"
        + table(head, rows)
    )


SECTIONS = (
    ("Parity with the simulation", "network/parity", parity),
    ("Behind one proxy and one relay", "network/behind", behind),
    ("Throughput of a relay", "network/relayed", relayed),
    ("Failures, replayed", "network/replay", replay),
    ("Churn", "network/churn", lived_through),
    ("Churn with PENS", "network/churn-pens", lived_through),
    ("Partition", "network/partition", lived_through),
    ("Twelve nodes with troubles", "network/troubles", troubled),
    ("New keys and removals under load", "network/renewals", renewed),
    ("Honest nodes under load", "network/alarms", alarms),
    ("Floods and held connections", "network/floods", flooded),
    ("Long run", "network/soak", soak),
    ("An hour", "network/hour", hour),
    ("One slow member", "network/pace", paced),
    ("Nodes that wait for nobody", "network/free", unhurried),
    ("Waiting for many", "network/idle", waited),
    ("Meeting", "network/meet", met),
    ("Large rosters", "network/rosters", held),
    ("Many nodes in one program", "network/inside", inside),
    ("Few of a large roster", "network/views", few_of_many),
    ("A slow link", "network/slow", slow),
    ("Damaged messages", "network/fuzz", fuzz),
    ("Attacks by a member", "network/members", attacked),
    ("Predicted and counted bytes", "network/bytes", predicted),
    ("Comparison with raw TCP", "performance/network", efficiency),
)


def library_of(machine: dict[str, Any]) -> str:
    """Return the network library of a measurement and its version; the first ones had another."""
    if "grpcio" in machine:
        return f"grpcio {machine['grpcio']}"
    return f"zenoh {machine['eclipse-zenoh']}"


def section(title: str, name: str, document: dict[str, Any], shown: Any) -> str:
    """Return one part of the page."""
    head = document["origin"]
    machine = head["machine"]
    source = (
        f"`{head['command']}`, {document['seconds']:,.0f} s on {machine['cores']} cores ({machine['processor']}), "
        f"Python {machine['python']}, torch {machine['torch']}, {library_of(machine)}. {told(name, head)}"
    )
    return f"## {title}\n\n{shown(document['results'])}\n\n{source}\n"


def page() -> str:
    """Return the page, of all that has been measured."""
    parts = []
    for title, name, shown in SECTIONS:
        path = STORED / f"{name}.json"
        if path.exists():
            parts.append(section(title, name, json.loads(path.read_text()), shown))
    return "\n".join([HEAD, *parts])


if __name__ == "__main__":
    sys.exit(write({REFERENCE / "network.md": page()}))

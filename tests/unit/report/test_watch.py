import http.client
import json
import socket
from urllib.parse import urlsplit

import pandas as pd
import pytest

from coterie._util.loopback import HOST
from coterie.errors import ConfigError
from coterie.report.watch import FolderFollower, WatchServer


def ask(watch, path, *, method="GET", host=None):
    """One request, as a browser on this machine or a forged one; status, headers and text."""
    connection = http.client.HTTPConnection(HOST, watch.port, timeout=30)
    connection.request(method, path, headers={"Host": host or f"{HOST}:{watch.port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


@pytest.fixture
def watch(small):
    with WatchServer(small) as page:
        yield page


def test_the_page_is_served_at_the_address_that_is_printed(watch):
    """The address holds the token; the page may connect to its own server and to nothing else."""
    parts = urlsplit(watch.address)
    assert parts.hostname == "127.0.0.1"
    status, headers, text = ask(watch, f"/?{parts.query}")
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    assert "connect-src 'self'" in text
    assert "63.75" in text


@pytest.mark.full
@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=wrong", "/data", "/data?token=wrong", "/?token=%ff"]
)
def test_without_the_token_nothing_is_told(watch, path):
    """Not even the name of the study."""
    status, _, text = ask(watch, path)
    assert status == 403
    assert "small" not in text


def test_another_host_name_is_refused_though_the_token_is_right(watch):
    """A name that was rebound to this machine is another site's page asking."""
    assert ask(watch, f"/?token={watch.token}", host="evil.example")[0] == 403
    assert ask(watch, f"/?token={watch.token}", host=f"localhost:{watch.port}")[0] == 200


@pytest.mark.full
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed_through_it(watch, method):
    """Only reading is implemented."""
    assert ask(watch, f"/?token={watch.token}", method=method)[0] == 501


def test_files_are_not_served(watch):
    """Paths are not looked up on the disk."""
    assert ask(watch, f"/DAC/seed-0/config.toml?token={watch.token}")[0] == 404
    assert ask(watch, f"/../../etc/passwd?token={watch.token}")[0] == 404


def test_only_this_machine_can_reach_it(watch):
    """It is bound to the loopback address, not to every one."""
    assert watch._server.server_address[0] == "127.0.0.1"


def test_news_come_once(watch, small, write_run, final_rows):
    """What was seen is not sent again; a new run is, with its numbers."""
    token = watch.token
    first = json.loads(ask(watch, f"/data?token={token}")[2])
    assert ask(watch, f"/data?token={token}&since={first['signature']}")[0] == 204
    rows = final_rows([0.9] * 4, [0, 0, 0, 1])
    write_run(small / "New" / "seed-0", kind="dac", label="New", seed=0, metrics=rows)
    status, _, text = ask(watch, f"/data?token={token}&since={first['signature']}")
    message = json.loads(text)
    assert status == 200
    assert [method["label"] for method in message["data"]["methods"]] == ["DAC", "Local", "New"]
    assert "90.00" in message["overview"]


def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path, write_run, final_rows):
    """The page says that there is nothing; when the run comes it follows."""
    follower = FolderFollower(tmp_path / "later")
    assert "Nothing to show yet" in follower.load_message()["overview"]
    write_run(
        tmp_path / "later" / "A" / "seed-0",
        kind="dac",
        label="A",
        seed=0,
        metrics=final_rows([0.5], [0]),
    )
    assert follower.load_message()["data"]["methods"][0]["label"] == "A"


def test_a_run_that_is_started_again_is_followed(small):
    """The folder is emptied and filled again: what was there is gone, without an error."""
    follower = FolderFollower(small)
    assert len(follower.load_message()["data"]["methods"]) == 2
    kept = {
        path.relative_to(small): path.read_bytes()
        for path in (small / "DAC").rglob("*")
        if path.is_file()
    }
    for path in small.rglob("*.*"):
        path.unlink()
    assert follower.load_message()["data"]["methods"] == []
    for path, content in kept.items():
        (small / path).write_bytes(content)
    assert [method["label"] for method in follower.load_message()["data"]["methods"]] == ["DAC"]


def test_an_unchanged_folder_is_not_read_again(small):
    """The same object is answered: reading a long run takes seconds."""
    follower = FolderFollower(small)
    assert follower.load_message() is follower.load_message()


@pytest.mark.parametrize("behind", ["metrics.parquet", "edges.parquet"])
def test_a_table_that_is_behind_the_other_is_followed(tmp_path, population_study, listed, behind):
    """A working run replaces its tables one after the other, so that a reader may see one round more in one of them."""
    study = population_study(tmp_path / "study", clusters=[0, 0, 1, 1], rounds=4, seeds=1)
    run = study / "DAC" / "seed-0"
    table = pd.read_parquet(run / behind)
    table[table["round"] < table["round"].max()].to_parquet(run / behind)
    listed(run)
    assert FolderFollower(study).load_message()["data"]["reads"]["ends"]


def test_a_single_run_can_be_followed(small):
    """One run folder, as a node leaves it."""
    assert (
        FolderFollower(small / "DAC" / "seed-1").load_message()["data"]["methods"][0]["runs"][0][
            "seed"
        ]
        == 1
    )


def test_a_taken_port_is_said_plainly(small):
    """Found, and what to do."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --port"):
            WatchServer(small, port=taken.getsockname()[1])


def test_a_nodes_network_is_followed_before_its_first_round_and_after(tmp_path, small):
    """The page of a node that waits for the others shows whom it waits for; news come when the file changes."""
    member = {"name": "hungary", "here": False, "since": 0, "seconds": 1.5, "slow": False,
              "refused": {"signature": 2}, "days": 12}  # fmt: skip
    own = {**member, "name": "cleveland", "here": True, "since": None, "refused": {}}
    found = {"node": "cleveland", "run": "hearts", "roster": 2, "state": "waiting", "round": -1,
             "min_peers": 1, "time": 0, "members": [own, member]}  # fmt: skip
    folder = tmp_path / "hearts" / "DAC" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "network.json").write_text(json.dumps(found))
    follower = FolderFollower(tmp_path)
    message = follower.load_message()
    assert "<h2>The network</h2>" in message["overview"]
    assert "Fewer than 1 other members are here" in message["overview"]
    assert "2 signature" in message["overview"]
    (folder / "network.json").write_text(json.dumps({**found, "state": "running", "round": 30}))
    assert follower.load_message()["signature"] != message["signature"]
    assert "running, round 30" in follower.load_message()["overview"]
    assert "The network" not in FolderFollower(small).load_message()["overview"]

"""What node.toml and relay.toml have in common."""

from pathlib import Path

import pytest

from coterie.net import local
from coterie.net.nodefile import NodeFile
from coterie.net.processfile import ProcessFile
from coterie.net.relay import RelayFile
from coterie.net.servicefile import ServiceFile


@pytest.mark.parametrize("kind", [NodeFile, ServiceFile, RelayFile])
def test_the_identity_is_that_of_three_files_in_the_files_folder(kind, tmp_path):
    who, _ = local.make_members([[0], [1]])
    local.create_credentials(tmp_path, who)
    file: ProcessFile = kind(key="n1.key", certificate="members/n1.pem", folder=tmp_path)
    assert file.resolve_path("studies/hearts") == tmp_path / "studies" / "hearts"
    own = file.load_identity()
    assert (own.name, own.key_file, own.ca_file) == ("n1", tmp_path / "n1.key", tmp_path / "ca.pem")
    assert kind().resolve_path("ca.pem") == Path("ca.pem")

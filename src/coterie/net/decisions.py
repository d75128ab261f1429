"""Decisions: what a person of a member says about a study, on the command line or on the page."""

from dataclasses import dataclass

from coterie.errors import ConfigError
from coterie.net import consent
from coterie.net.ledger import FAILED, Entry
from coterie.net.service import Membership
from coterie.net.statements import find_code, parse_proposed


@dataclass(frozen=True)
class Decisions:
    """What this member may say about a study, each after it was checked that it may.

    Args:
        membership: the member's folder.
        entry: the study.
    """

    membership: Membership
    entry: Entry

    @property
    def own(self) -> str:
        """This member's name."""
        return self.membership.own.name

    def describe(self, *, loads_code: bool = False) -> list[str]:
        """Check the data of the study's role, and return what would leave this member, in lines.

        Args:
            loads_code: whether what the study loads from this machine is loaded.

        Raises:
            ConfigError: when the data are not such as the study expects.
            DataError: when they cannot be read.
        """
        proposal = self.entry.proposal
        if self.own not in proposal.members:
            return consent.describe_sending(proposal, None, self.own)
        study = parse_proposed(proposal.study, to_run=loads_code)
        file = self.membership.make_node_file(proposal)
        rows = consent.load_role(file, proposal, study, (proposal.members.index(self.own),))
        if find_code(proposal.study) and not loads_code:
            rows = None
        return consent.describe_sending(proposal, rows, self.own)

    def _check_open(self) -> None:
        """Check that the study is not over here: what is said of it then would change nothing.

        Raises:
            ConfigError: when it is.
        """
        name, by = self.entry.proposal.name, self.entry.proposal.by
        if self.entry.is_withdrawn:
            raise ConfigError(f"{by} has withdrawn {name}, which ended it at all members")
        for kind, text in (("stop", "stopped"), ("end", "finished")):
            if self.entry.says(kind, self.own):
                raise ConfigError(
                    f"{self.own} has {text} it before, and {name} runs here no more; propose it "
                    "again under another name"
                )

    def approve(self, *, loads_code: bool = False) -> list[str]:
        """Approve the study; return what will leave this member, in lines.

        Args:
            loads_code: whether what the study loads from this machine is approved, too.

        Raises:
            ConfigError: when this member cannot take part in it.
        """
        name, proposal = self.entry.proposal.name, self.entry.proposal
        self._check_open()
        found = find_code(proposal.study)
        if found and not loads_code:
            raise ConfigError(
                f"{name} would load {'; '.join(found[:5])}: look at that on this machine, and "
                "approve it with --code"
            )
        if self.own not in proposal.members:
            raise ConfigError(f"{self.own} is none of the members of {name}")
        lines = self.describe(loads_code=loads_code)
        # What went wrong before is tried again.
        (self.entry.folder / FAILED).unlink(missing_ok=True)
        self.membership.say("approval", self.entry)
        return lines

    def decline(self) -> None:
        """Decline the study.

        Raises:
            ConfigError: when it is approved already, or over.
        """
        name = self.entry.proposal.name
        self._check_open()
        if self.entry.says("approval", self.own):
            raise ConfigError(f"{name} is approved already; end it here with: coterie stop {name}")
        self.membership.say("refusal", self.entry)

    def withdraw(self) -> None:
        """Withdraw the study, which ends it at all members.

        Raises:
            ConfigError: when another member has proposed it.
        """
        name, by = self.entry.proposal.name, self.entry.proposal.by
        if by != self.own:
            raise ConfigError(
                f"{name} was proposed by {by}, who alone withdraws it; end it for this member "
                f"with: coterie stop {name}"
            )
        self.membership.say("withdrawal", self.entry)

    def stop(self) -> None:
        """Stop the study for this member, for good.

        Raises:
            ConfigError: when it is over: others may still be in their last rounds.
        """
        if not self.entry.says("stop", self.own):
            self._check_open()
        self.membership.say("stop", self.entry)

    def list_possible(self) -> list[str]:
        """Return the names of the functions above that make sense now."""
        entry, found = self.entry, list[str]()
        if entry.is_withdrawn or entry.says("end", self.own) or entry.says("stop", self.own):
            return []
        if self.own in entry.proposal.members:
            approved, failed = entry.says("approval", self.own), (entry.folder / FAILED).exists()
            if not approved or failed:
                found.append("approve")
            if not approved and not entry.says("refusal", self.own):
                found.append("decline")
            if approved:
                found.append("stop")
        if entry.proposal.by == self.own:
            found.append("withdraw")
        return found

"""What a study is planned to compare: written down and hashed before its first run."""

from __future__ import annotations

import hashlib
import math

import msgspec

MARGIN = math.log(1.01)  # nats: 1 % of perplexity, where no design names a margin


class Design(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The planned comparison. Arms that are added after the first run are not part of it."""

    controls: tuple[str, ...]  # control arms
    arms: tuple[str, ...]  # judged against them
    primary: str  # one of the arms; "": every verdict is exploratory
    seeds: tuple[int, ...]
    looks: tuple[int, ...]  # numbers of seeds at which there is a verdict, ascending
    margin: float  # of equivalence, in units of the metric
    metric: str = "final validation loss in nats"
    earlier_looks: tuple[int, ...] = ()  # of older studies at these seeds
    choice: str = ""  # file with the tuned learning rates of the arms; "": none are tuned
    sha256: str = ""  # of the other entries

    @property
    def digest(self) -> str:
        """SHA-256 of the other entries."""
        content = msgspec.json.encode(msgspec.structs.replace(self, sha256=""), order="sorted")
        return hashlib.sha256(content).hexdigest()

    @property
    def hashed(self) -> Design:
        """The design with its SHA-256."""
        return msgspec.structs.replace(self, sha256=self.digest)

    @property
    def altered(self) -> bool:
        """Whether an entry does not agree with the SHA-256."""
        return self.sha256 != self.digest

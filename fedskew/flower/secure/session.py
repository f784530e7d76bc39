"""Definitions for both sides of a session: thresholds, public keys, and the bytes that sites sign in steps 1 and 4."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedskew.flower.wire import Facts, Garbled

FEWEST_SITES = 3
"""The minimum number of sites in a session. With two sites, each could compute the other's update from the sum."""
LEAST_THRESHOLD = 2 / 3
"""The smallest allowed threshold.

A threshold is the fraction of a round's planned sites that must help to unmask its sum.

A dishonest server must not learn both secrets of a site. The server could tell some sites that this site's update
arrived, and others that it did not. For each of the two secrets, the server needs shares from t of n sites, where t is
the threshold times n, rounded up. An honest site reveals a share of only one secret. A site that colludes with the
server reveals both. So if c of n sites collude, the server gets at most n + c shares, and fails if 2·t > n + c. With
the threshold 2/3, this holds as long as fewer than a third of the sites collude.

n is the number of sites with which a round is planned, even if fewer sites begin the round. If n were the number of
sites that begin, a server could leave out honest sites until a third of the rest collude. If more sites begin than were
planned, t is at least two thirds of the sites that begin.
"""


def count_needed(sites: int, threshold: float) -> int:
    """The smallest number of sites that can unmask a sum, if a round is planned with `sites` sites."""
    return max(2, math.ceil(threshold * sites - 1e-9))  # 1e-9 absorbs rounding errors of the product


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of one site in one session."""

    sealing: bytes
    """The key with which sites agree on keys for the encryption of shares."""
    masking: bytes
    """The key with which sites agree on the seeds of pairwise masks."""
    commitment: bytes
    """The hash of the seed of the site's own mask. With it, the server checks the seed that it recovers from shares."""
    signature: str

    def to_json(self) -> Facts:
        keys = {name: getattr(self, name).hex() for name in ("sealing", "masking", "commitment")}
        return {**keys, "signature": self.signature}

    @classmethod
    def from_json(cls, values: object) -> PublicKeys:
        if not isinstance(values, dict) or values.keys() != {"sealing", "masking", "commitment", "signature"}:
            raise Garbled("its keys are not readable")
        sealing, masking, commitment = (from_hex(values[name], 32) for name in ("sealing", "masking", "commitment"))
        return cls(sealing, masking, commitment, str(values["signature"]))


def from_hex(value: object, length: int | None = None) -> bytes:
    """Read bytes that another machine sent as text."""
    try:
        content = bytes.fromhex(str(value))
    except ValueError as error:
        raise Garbled("it has bytes that are not readable") from error
    if length is not None and len(content) != length:
        raise Garbled(f"it has a value of {len(content)} bytes; expected {length}")
    return content


def canonical(label: str, *values: object) -> bytes:
    """Return the label and the values as bytes. Different labels or values give different bytes."""
    return json.dumps(["fedskew secure aggregation 1", label, *values], sort_keys=True).encode()


def keys_message(session: str, site: str, sealing: bytes, masking: bytes, commitment: bytes) -> bytes:
    """The bytes that a site signs in step 1."""
    return canonical("keys", session, site, sealing.hex(), masking.hex(), commitment.hex())


def keys_context(session: str, keys: Mapping[str, PublicKeys]) -> bytes:
    """The bytes that identify a session and the keys of all its sites."""
    return canonical("context", session, {site: found.to_json() for site, found in keys.items()})


def confirmation(context: bytes, request: str, contributors: Iterable[str]) -> bytes:
    """The bytes that a site signs in step 4. `request` is the digest of the server's request in step 3."""
    return canonical("confirm", context.decode(), request, sorted(contributors))

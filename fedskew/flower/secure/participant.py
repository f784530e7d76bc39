"""The site's side of a session of secure aggregation.

A site takes each step once, in order. `__init__.py` lists the steps by number. The refusals in `confirm` and `unmask`
protect the site from a dishonest server.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping

from fedskew.errors import UserError, plural
from fedskew.flower.secure.identity import NodeIdentity, Roster, verify
from fedskew.flower.secure.keys import AgreementKey, decrypt, encrypt
from fedskew.flower.secure.masks import Vector, add_pairwise_mask, expand_seed
from fedskew.flower.secure.session import (
    FEWEST_SITES,
    LEAST_THRESHOLD,
    PublicKeys,
    canonical,
    confirmation,
    count_needed,
    keys_context,
    keys_message,
)
from fedskew.flower.secure.shares import SECRET_BYTES, split_secret
from fedskew.flower.wire import Garbled

STEPS = ("keys", "shares", "input", "confirm", "unmask", "end")
RecordRelease = Callable[[str, list[str]], None]
"""Records that a site is about to reveal shares, or raises an error if the site must not reveal them.

The arguments are the request's digest and the contributors.
"""


class Participant:
    """The secrets of one site in one session."""

    def __init__(self, session: str, name: str, identity: NodeIdentity, roster: Roster, needed: int) -> None:
        """`needed` is the smallest number of sites that can unmask a sum."""
        self._session, self._name, self._identity = session, name, identity
        self._roster, self._needed = roster, needed
        self._sealing, self._masking = AgreementKey(), AgreementKey()
        self._seed = secrets.token_bytes(SECRET_BYTES)
        """The seed of the site's own mask.

        This mask protects a late update. Without it, a server could say that the update is missing, learn the update's
        pairwise masks, and read the update when it arrives.
        """
        self._keys: dict[str, PublicKeys] = {}
        self._own_shares = (b"", b"")
        self._held_shares: dict[str, tuple[bytes, bytes]] = {}
        """A share of the seed and a share of the masking key, by site: for this site and each site that sent shares."""
        self._request = ""
        self._contributors: list[str] = []
        self._next = "keys"

    @property
    def is_open(self) -> bool:
        """Whether the session waits for a step."""
        return self._next != STEPS[-1]

    def end(self) -> None:
        """Allow no further step."""
        self._next = STEPS[-1]

    def public_keys(self) -> PublicKeys:
        """Step 1: return the signed public keys."""
        self._begin("keys")
        sealing, masking = self._sealing.public, self._masking.public
        commitment = hashlib.sha256(self._seed).digest()
        signature = self._identity.sign(keys_message(self._session, self._name, sealing, masking, commitment))
        self._keys = {self._name: PublicKeys(sealing, masking, commitment, signature)}
        return self._keys[self._name]

    def make_shares(self, keys: Mapping[str, PublicKeys]) -> dict[str, bytes]:
        """Step 2: return encrypted shares of both secrets for every other site."""
        self._begin("shares")
        own = self._keys[self._name]
        if keys.get(self._name) != own:
            raise Garbled("the session's list of keys does not have this site's keys")
        fewest = max(FEWEST_SITES, self._needed)
        if len(keys) < fewest:
            raise Garbled(f"the session has {len(keys)} sites; expected at least {fewest}")
        for name, found in keys.items():
            self._check_keys(name, found)
        public = [key for found in keys.values() for key in (found.sealing, found.masking)]
        if len(set(public)) < len(public):
            raise Garbled("two keys of the session are the same")
        self._keys = {name: keys[name] for name in sorted(keys)}
        self._needed = max(self._needed, count_needed(len(keys), LEAST_THRESHOLD))
        own_secrets = (self._seed, self._masking.private)
        shares = [split_secret(secret, self._needed, len(keys)) for secret in own_secrets]
        by_site = dict(zip(self._keys, zip(*shares, strict=True), strict=True))
        self._own_shares = by_site.pop(self._name)
        return {
            peer: encrypt(self._sealing_key(peer), b"".join(pair), self._sealing_context(self._name, peer))
            for peer, pair in by_site.items()
        }

    def _check_keys(self, name: str, keys: PublicKeys) -> None:
        if name not in self._roster:
            raise Garbled(f"the session has a site {name!r} that is not in the roster")
        message = keys_message(self._session, name, keys.sealing, keys.masking, keys.commitment)
        try:
            verify(self._roster[name], keys.signature, message)
        except Garbled as error:
            raise Garbled(f"{name}: {error}") from error

    def receive_shares(self, sealed: Mapping[str, bytes]) -> None:
        """Step 3, before the site works on the request: read the shares of the other sites."""
        self._begin("input")
        if strange := sorted(sealed.keys() - (self._keys.keys() - {self._name})):
            raise Garbled(f"shares come from {strange[0]!r}, which has no keys in the session")
        self._held_shares = {self._name: self._own_shares}
        for peer, content in sealed.items():
            opened = decrypt(self._sealing_key(peer), content, self._sealing_context(peer, self._name))
            self._held_shares[peer] = opened[:SECRET_BYTES], opened[SECRET_BYTES:]
        if len(self._held_shares) < self._needed:
            raise Garbled(
                f"this site has the shares of {plural(len(self._held_shares), 'site')}, itself included; expected at "
                f"least {self._needed}"
            )

    def mask(self, vector: Vector, request: str) -> Vector:
        """Step 3: return the vector with all masks. `request` is the digest of the server's request."""
        if self._next != "confirm":
            raise UserError(f"the session expects the step {self._next!r}, not a masked vector")
        if self._request:
            raise UserError(
                "this session's masks have been used; a second vector would reveal the difference between the vectors"
            )
        self._request = request
        masked = vector + expand_seed(self._seed, len(vector))
        for peer in self._held_shares.keys() - {self._name}:
            masked = add_pairwise_mask(masked, self._masking_seed(peer), self._name, peer)
        return masked

    def confirm(self, contributors: list[str]) -> str:
        """Step 4: sign the list of sites whose vectors are in the sum.

        A site signs one list per session, and only a list that it is on. A sum is unmasked only if at least two thirds
        of the session's sites have signed the sum's list. So two sums over nearly the same sites have signers in
        common. If both sums are for the same request, these sites refuse the second one (`ReleasedSums`). If sites also
        signed lists that they are not on, a server could find other signers for the second sum. The difference between
        two sums could be a single vector.
        """
        self._begin("confirm")
        if not self._request:
            raise UserError("the server asks to confirm a sum to which this site has not contributed")
        if len(set(contributors)) < len(contributors) or not set(contributors) <= self._held_shares.keys():
            raise Garbled("the list of contributors names a site twice, or a site that did not send shares")
        if self._name not in contributors:
            raise Garbled("the list of contributors does not have this site, which has sent its masked vector")
        if len(contributors) < self._needed:
            raise Garbled(
                f"the sum has {plural(len(contributors), 'contributor')}; this site needs at least {self._needed}"
            )
        self._contributors = sorted(contributors)
        return self._identity.sign(self._confirmation())

    def unmask(self, signatures: Mapping[str, object], record: RecordRelease) -> tuple[dict[str, bytes], ...]:
        """Step 5: return shares of the contributors' seeds, and shares of the other sites' masking keys.

        If enough sites revealed shares of both secrets of a site, the server could read that site's update. So a
        participant never reveals both. It reveals shares only if enough sites signed the same list as the participant,
        for the same request.
        """
        self._begin("unmask")
        confirmed = sum(self._has_signed(name, signatures.get(name)) for name in self._held_shares)
        if confirmed < self._needed:
            raise Garbled(f"{plural(confirmed, 'site')} confirmed the sum; this site needs at least {self._needed}")
        record(self._request, self._contributors)
        seeds = {name: self._held_shares[name][0] for name in self._contributors}
        masking_keys = {name: shares[1] for name, shares in self._held_shares.items() if name not in seeds}
        self._held_shares, self._seed = {}, b""
        return seeds, masking_keys

    def _has_signed(self, name: str, signature: object) -> bool:
        """Whether a site has signed the list that this site signed, for the same request."""
        try:
            verify(self._roster[name], signature, self._confirmation())
        except Garbled:
            return False
        return True

    def _begin(self, step: str) -> None:
        """Allow each step once and in order. A step that failed cannot be repeated."""
        if step != self._next:
            raise UserError(f"the server asks for step {step!r} of a session; this site expects {self._next!r}")
        self._next = STEPS[STEPS.index(step) + 1]

    def _confirmation(self) -> bytes:
        return confirmation(self._context(), self._request, self._contributors)

    def _context(self) -> bytes:
        return keys_context(self._session, self._keys)

    def _sealing_key(self, peer: str) -> bytes:
        return self._sealing.agree(
            self._keys[peer].sealing, canonical("seal", self._session, *sorted((self._name, peer)))
        )

    def _sealing_context(self, sender: str, receiver: str) -> bytes:
        return canonical("shares", self._context().decode(), sender, receiver)

    def _masking_seed(self, peer: str) -> bytes:
        return self._masking.agree(self._keys[peer].masking, mask_purpose(self._session, self._name, peer))


def mask_purpose(session: str, one: str, other: str) -> bytes:
    """Return the `purpose` for `AgreementKey.agree` from which two sites derive the seed of their pairwise mask."""
    return canonical("mask", session, *sorted((one, other)))

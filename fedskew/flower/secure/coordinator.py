"""The server's side of a session of secure aggregation: pass on keys and shares, and remove the masks from the sum.

`__init__.py` lists the steps of a session by number.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping

import numpy as np

from fedskew.errors import plural
from fedskew.flower.secure.keys import AgreementKey
from fedskew.flower.secure.masks import Vector, add_pairwise_mask, expand_seed
from fedskew.flower.secure.participant import mask_purpose
from fedskew.flower.secure.session import LEAST_THRESHOLD, PublicKeys, count_needed
from fedskew.flower.secure.shares import combine_shares
from fedskew.flower.wire import Garbled


class Coordinator:
    """The server's side of one session."""

    def __init__(self, needed: int) -> None:
        """`needed` is the smallest number of sites that can unmask a sum."""
        self.session = secrets.token_hex(16)
        self.needed = needed
        self._keys: dict[str, PublicKeys] = {}
        self._sealed: dict[str, dict[str, str]] = {}

    def receive_keys(self, keys: Mapping[str, PublicKeys]) -> None:
        """After step 1: keep the keys of the sites that take part in the session."""
        self._keys = {name: keys[name] for name in sorted(keys)}
        self.needed = max(self.needed, count_needed(len(keys), LEAST_THRESHOLD))

    def keys_to_send(self) -> dict[str, object]:
        return {name: keys.to_json() for name, keys in self._keys.items()}

    def receive_shares(self, sealed: Mapping[str, dict[str, str]]) -> None:
        """After step 2: keep the encrypted shares. `sealed[a][b]` has those that site a sends to site b."""
        self._sealed = dict(sealed)

    @property
    def sharing(self) -> list[str]:
        """The names of the sites that have sent shares."""
        return list(self._sealed)

    def shares_for(self, receiver: str) -> dict[str, str]:
        return {sender: sealed[receiver] for sender, sealed in self._sealed.items() if sender != receiver}

    def unmask(
        self,
        masked: Mapping[str, Vector],
        seed_shares: Mapping[str, Mapping[str, bytes]],
        key_shares: Mapping[str, Mapping[str, bytes]],
    ) -> Vector:
        """After step 5: return the sum of the contributors' vectors.

        `masked` has the contributors' masked vectors. `seed_shares` and `key_shares` have the revealed shares of seeds
        and of masking keys: `seed_shares[a][b]` is the share of b's seed that site a revealed.
        """
        total: Vector = np.sum(list(masked.values()), axis=0, dtype=np.uint64)
        length = len(total)
        for name in masked:
            seed = self._recover(name, seed_shares)
            if hashlib.sha256(seed).digest() != self._keys[name].commitment:
                raise Garbled(f"the revealed shares do not give the seed of {name}: a site has sent a wrong share")
            total = total - expand_seed(seed, length)
        for missing in self._sealed.keys() - masked.keys():
            key = AgreementKey(self._recover(missing, key_shares))
            if key.public != self._keys[missing].masking:
                raise Garbled(f"the revealed shares do not give the key of {missing}: a site has sent a wrong share")
            for name in masked:
                purpose = mask_purpose(self.session, missing, name)
                total = add_pairwise_mask(total, key.agree(self._keys[name].masking, purpose), missing, name)
        return total

    def _recover(self, owner: str, revealed: Mapping[str, Mapping[str, bytes]]) -> bytes:
        """Compute a site's secret from the shares that sites revealed."""
        share_numbers = {name: number for number, name in enumerate(self._keys, start=1)}
        shares = {share_numbers[holder]: found[owner] for holder, found in revealed.items() if owner in found}
        if len(shares) < self.needed:
            raise Garbled(f"{plural(len(shares), 'site')} revealed a share for {owner}; expected {self.needed}")
        return combine_shares(dict(list(shares.items())[: self.needed]))


def require_enough(step: str, present: Iterable[object], needed: int) -> None:
    """Raise `Garbled` if too few sites are left."""
    found = len(list(present))
    if found < needed:
        raise Garbled(f"secure aggregation needs {needed} sites in step {step!r}, but {found} completed it")

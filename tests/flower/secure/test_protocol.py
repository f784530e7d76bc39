"""The protocol, without Flower: sums are right, masks hide, and a site refuses what would reveal a single vector."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from secure_sites import identity, roster

from fedskew.errors import UserError
from fedskew.flower.secure.coordinator import Coordinator
from fedskew.flower.secure.keys import AgreementKey
from fedskew.flower.secure.masks import Vector, expand_seed
from fedskew.flower.secure.participant import Participant
from fedskew.flower.secure.session import PublicKeys, count_needed, keys_message
from fedskew.flower.secure.shares import combine_shares, split_secret
from fedskew.flower.wire import Garbled

NAMES = ("a", "b", "c", "d", "e")
NEEDED = 4


def vector(number: int, length: int = 40) -> Vector:
    return np.random.default_rng(number).integers(0, 2**62, length, dtype=np.uint64)


class Session:
    """A session of real participants, in which sites may vanish before any step."""

    def __init__(self, names: Iterable[str] = NAMES, request: str = "request", needed: int = NEEDED) -> None:
        self.coordinator = Coordinator(needed)
        self.request = request
        self.sites = {
            name: Participant(self.coordinator.session, name, identity(NAMES, name), roster(NAMES), needed)
            for name in names
        }
        self.released: list[tuple[str, list[str]]] = []
        self.masked: dict[str, Vector] = {}

    def vanish(self, *names: str) -> None:
        for name in names:
            del self.sites[name]

    def keys(self) -> dict[str, PublicKeys]:
        keys = {name: site.public_keys() for name, site in self.sites.items()}
        self.coordinator.receive_keys(keys)
        return keys

    def shares(self, keys: dict[str, PublicKeys]) -> None:
        made = {name: site.make_shares(keys) for name, site in self.sites.items()}
        self.coordinator.receive_shares({n: {peer: s.hex() for peer, s in m.items()} for n, m in made.items()})

    def inputs(self, values: dict[str, Vector]) -> None:
        for name, site in self.sites.items():
            sealed = {sender: bytes.fromhex(s) for sender, s in self.coordinator.shares_for(name).items()}
            site.receive_shares(sealed)
            self.masked[name] = site.mask(values[name], self.request)

    def confirm(self, contributors: list[str] | None = None) -> dict[str, str]:
        return {name: site.confirm(contributors or list(self.masked)) for name, site in self.sites.items()}

    def unmask(self, signatures: dict[str, str]) -> Vector:
        revealed = {
            name: site.unmask(signatures, lambda request, names: self.released.append((request, names)))
            for name, site in self.sites.items()
        }
        seeds, keys = ({name: shares[i] for name, shares in revealed.items()} for i in (0, 1))
        return self.coordinator.unmask(self.masked, seeds, keys)

    def up_to_inputs(self, values: dict[str, Vector]) -> Session:
        self.shares(self.keys())
        self.inputs(values)
        return self


VALUES = {name: vector(number) for number, name in enumerate(NAMES)}


def total(names: Iterable[str]) -> Vector:
    return np.sum([VALUES[name] for name in names], axis=0, dtype=np.uint64)


@pytest.mark.parametrize("vanishing", ["before keys", "keys", "shares", "inputs", "confirm", "never"])
def test_the_sum_of_those_who_stay_is_exact_whenever_a_site_vanishes(vanishing: str) -> None:
    session = Session()
    if vanishing == "before keys":
        session.vanish("c")
    keys = session.keys()
    if vanishing == "keys":
        session.vanish("c")
    session.shares(keys)
    if vanishing == "shares":
        session.vanish("c")
    session.inputs(VALUES)
    if vanishing == "inputs":
        session.vanish("c")
    signatures = session.confirm()
    if vanishing == "confirm":
        session.vanish("c")
    contributors = [n for n in NAMES if n != "c" or vanishing in ("inputs", "confirm", "never")]
    assert list(session.masked) == contributors
    assert (session.unmask(signatures) == total(contributors)).all()
    assert session.released[0] == ("request", contributors)


def test_below_the_threshold_there_is_no_sum() -> None:
    session = Session().up_to_inputs(VALUES)
    signatures = session.confirm()
    session.vanish("a", "b")
    with pytest.raises(Garbled, match=r"3 sites revealed a share for a; expected 4"):
        session.unmask(signatures)
    few = Session().up_to_inputs(VALUES)
    few.vanish("a", "b")
    with pytest.raises(Garbled, match="3 sites confirmed the sum; this site needs at least 4"):
        few.unmask(few.confirm())
    pair = Session(["a", "b", "c"])
    keys = pair.keys()
    with pytest.raises(Garbled, match="the session has 3 sites; expected at least 4"):
        pair.shares(keys)


def test_two_thirds_of_a_session_are_needed_even_if_fewer_were_planned() -> None:
    session = Session(needed=2).up_to_inputs(VALUES)
    with pytest.raises(Garbled, match="the sum has 3 contributors; this site needs at least 4"):
        session.confirm(["a", "b", "c"])


def test_a_masked_vector_says_nothing_about_the_vector() -> None:
    """The same vector differs everywhere between two sessions, and masked zeros look like random numbers."""
    values = dict.fromkeys(NAMES, np.zeros(20_000, np.uint64))
    one, other = (Session().up_to_inputs(values).masked for _ in range(2))
    for name in NAMES:
        assert (one[name] != other[name]).all()
        bits = np.unpackbits(one[name].view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / len(bits) ** 0.5
        counts = np.bincount(one[name].view(np.uint8), minlength=256)
        expected = counts.sum() / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - 255) < 6 * (2 * 255) ** 0.5
        constant = one[name] - Session().up_to_inputs({n: v + np.uint64(5) for n, v in values.items()}).masked[name]
        assert len(set(constant.tolist())) == len(constant)


def test_a_single_vector_stays_masked_after_the_sum_is_unmasked() -> None:
    """The server then knows the seed of every site's own mask. The pairwise masks are still there."""
    session = Session().up_to_inputs(VALUES)
    signatures = session.confirm()
    revealed = {name: site.unmask(signatures, lambda *_: None)[0] for name, site in session.sites.items()}
    for owner in NAMES:
        shares = {number: revealed[holder][owner] for number, holder in enumerate(NAMES[:NEEDED], start=1)}
        without_own_mask = session.masked[owner] - expand_seed(combine_shares(shares), len(VALUES[owner]))
        assert (without_own_mask != VALUES[owner]).all()
    assert (session.coordinator.unmask(session.masked, revealed, {name: {} for name in NAMES}) == total(NAMES)).all()


def test_masks_of_four_of_five_sites_do_not_cancel() -> None:
    session = Session().up_to_inputs(dict.fromkeys(NAMES, np.zeros(1000, np.uint64)))
    partial = np.sum([session.masked[name] for name in NAMES[:4]], axis=0, dtype=np.uint64)
    whole = np.sum(list(session.masked.values()), axis=0, dtype=np.uint64)
    assert partial.all()
    assert whole.all()  # the sites' own masks are still there
    assert not session.unmask(session.confirm()).any()


def test_a_site_reveals_one_of_the_two_secrets_of_a_peer() -> None:
    session = Session()
    keys = session.keys()
    session.shares(keys)
    session.vanish("e")
    session.inputs(VALUES)
    signatures = session.confirm()
    asked = session.sites["a"]
    seeds, others = asked.unmask(signatures, lambda *_: None)
    assert sorted(seeds) == ["a", "b", "c", "d"]
    assert sorted(others) == ["e"]
    with pytest.raises(UserError, match="this site expects 'end'"):
        asked.unmask(signatures, lambda *_: None)
    with pytest.raises(UserError, match="this site expects 'end'"):
        asked.confirm(["a", "b", "c", "e"])


def test_a_server_that_tells_sites_of_different_contributors_gets_no_shares() -> None:
    """It would learn the seed of b from some sites, and the key of b from others."""
    session = Session().up_to_inputs(VALUES)
    without = [name for name in NAMES if name != "b"]
    signatures = {n: session.sites[n].confirm(list(NAMES) if n in "abc" else without) for n in NAMES}
    for name in NAMES:
        with pytest.raises(Garbled, match=r"[23] sites confirmed the sum; this site needs at least 4"):
            session.sites[name].unmask(signatures, lambda *_: None)


def test_sites_that_received_different_requests_do_not_unmask_their_sum() -> None:
    """A server that sends one site another model could read that site's update from the sum."""
    session = Session()
    session.shares(session.keys())
    for name, site in session.sites.items():
        site.receive_shares({s: bytes.fromhex(x) for s, x in session.coordinator.shares_for(name).items()})
        session.masked[name] = site.mask(VALUES[name], "another model" if name in "ab" else "model")
    with pytest.raises(Garbled, match=r"[23] sites confirmed"):
        session.unmask(session.confirm())


def test_a_site_masks_one_vector_per_session() -> None:
    session = Session().up_to_inputs(VALUES)
    with pytest.raises(UserError, match="a second vector would reveal the difference"):
        session.sites["a"].mask(VALUES["b"], "request")
    with pytest.raises(UserError, match="this site expects 'confirm'"):
        session.sites["a"].receive_shares({})


def test_a_list_of_too_few_or_unknown_contributors_is_not_confirmed() -> None:
    session = Session().up_to_inputs(VALUES)
    with pytest.raises(Garbled, match="the sum has 1 contributor;"):
        session.sites["a"].confirm(["a"])
    with pytest.raises(Garbled, match="did not send shares"):
        session.sites["b"].confirm(["a", "b", "c", "x"])
    with pytest.raises(Garbled, match="did not send shares"):
        session.sites["c"].confirm(["a", "a", "b", "c"])


def test_a_site_confirms_only_a_list_that_it_is_on() -> None:
    """Otherwise sites that are on no list could help to unmask {a, b}, {a, c} and {a, b, c}, which reveal a."""
    session = Session().up_to_inputs(VALUES)
    with pytest.raises(Garbled, match="does not have this site, which has sent its masked vector"):
        session.sites["e"].confirm(["a", "b", "c", "d"])
    with pytest.raises(UserError, match="this site expects 'unmask'"):
        session.sites["e"].confirm(list(NAMES))


def test_keys_that_another_made_in_the_name_of_a_site_are_refused() -> None:
    session = Session()
    keys = session.keys()
    session_name = session.coordinator.session
    impostor = Participant(session_name, "e", identity(NAMES, "d"), roster(NAMES), NEEDED).public_keys()
    with pytest.raises(Garbled, match="e: its signature does not match its node key"):
        session.sites["a"].make_shares({**keys, "e": impostor})
    with pytest.raises(Garbled, match="'x' that is not in the roster"):
        session.sites["b"].make_shares({**keys, "x": keys["e"]})
    with pytest.raises(Garbled, match="does not have this site's keys"):
        session.sites["c"].make_shares({**keys, "c": keys["e"]})
    earlier = Session().keys()
    with pytest.raises(Garbled, match="e: its signature"):
        session.sites["d"].make_shares({**keys, "e": earlier["e"]})


def test_a_signature_covers_all_keys_and_no_two_keys_are_the_same() -> None:
    session = Session()
    keys = session.keys()
    other_seed = replace(keys["e"], commitment=bytes(32))
    with pytest.raises(Garbled, match="e: its signature does not match"):
        session.sites["a"].make_shares({**keys, "e": other_seed})
    same = keys_message(session.coordinator.session, "e", keys["e"].masking, keys["e"].masking, bytes(32))
    signed = PublicKeys(keys["e"].masking, keys["e"].masking, bytes(32), identity(NAMES, "e").sign(same))
    with pytest.raises(Garbled, match="two keys of the session are the same"):
        session.sites["b"].make_shares({**keys, "e": signed})


def test_points_of_small_order_are_no_keys() -> None:
    """With such a key, the agreed secret would be known to everyone."""
    for point in (bytes(32), b"\1" + bytes(31), bytes(31)):
        with pytest.raises(Garbled, match="a public key is not valid"):
            AgreementKey().agree(point, b"purpose")


def test_shares_are_for_sites_that_received_the_same_keys() -> None:
    """A server could otherwise collect shares of one secret from two groups of sites, each with its own threshold."""
    session = Session()
    keys = session.keys()
    shares = session.sites["a"].make_shares(keys)
    session.sites["b"].make_shares({name: found for name, found in keys.items() if name != "e"})
    with pytest.raises(Garbled, match="shares from another site were changed, or belong to another session"):
        session.sites["b"].receive_shares({"a": shares["b"]})


def test_a_site_needs_enough_other_sites_before_it_sends_anything() -> None:
    pair = Session(["a", "b"], needed=2)
    keys = pair.keys()
    with pytest.raises(Garbled, match="the session has 2 sites; expected at least 3"):
        pair.shares(keys)
    session = Session()
    session.shares(session.keys())
    with pytest.raises(Garbled, match="this site has the shares of 1 site, itself included; expected at least 4"):
        session.sites["a"].receive_shares({})


def test_shares_that_were_changed_or_are_for_another_site_are_refused() -> None:
    session = Session()
    session.shares(session.keys())
    for_a, for_b = (session.coordinator.shares_for(name) for name in "ab")
    flipped = bytes.fromhex(for_a["c"])[:-1] + bytes([bytes.fromhex(for_a["c"])[-1] ^ 1])
    for changed, site in ((flipped, "a"), (bytes.fromhex(for_a["c"]), "b")):
        received = {s: bytes.fromhex(x) for s, x in (for_a if site == "a" else for_b).items()}
        with pytest.raises(Garbled, match="shares from another site were changed"):
            session.sites[site].receive_shares({**received, "c": changed})


def test_a_wrong_share_is_found() -> None:
    session = Session().up_to_inputs(VALUES)
    signatures = session.confirm()
    revealed = {name: site.unmask(signatures, lambda *_: None) for name, site in session.sites.items()}
    seeds = {name: dict(shares[0]) for name, shares in revealed.items()}
    seeds["a"]["b"] = bytes(32)
    with pytest.raises(Garbled, match="do not give the seed of b"):
        session.coordinator.unmask(session.masked, seeds, {name: shares[1] for name, shares in revealed.items()})


def test_fewer_shares_than_needed_say_nothing_of_a_secret() -> None:
    secret = bytes(range(32))
    shares = dict(enumerate(split_secret(secret, 4, 5), start=1))
    assert combine_shares({n: shares[n] for n in (1, 3, 4, 5)}) == secret
    assert combine_shares({n: shares[n] for n in (1, 3, 4)}) != secret
    again = dict(enumerate(split_secret(secret, 4, 5), start=1))
    assert all(shares[n] != again[n] for n in shares)


@pytest.mark.parametrize(("sites", "needed"), [(3, 2), (4, 3), (5, 4), (6, 4), (7, 5), (9, 6), (30, 20), (100, 67)])
def test_two_thirds_are_needed(sites: int, needed: int) -> None:
    assert count_needed(sites, 2 / 3) == needed
    colluding = -(-sites // 3) - 1
    assert 2 * needed > sites + colluding

"""Which clients take part in a round."""

from __future__ import annotations

from toy_runs import image_federation, linear, norm_and_dropout, trained

from fedskew.methods import METHODS, make_method

PKD = {"groups": [[0, 3], [1, 2]], "warmup_rounds": 1, "expert_rounds": 2}


def test_clients_are_drawn_without_replacement_in_order_and_anew_each_round() -> None:
    federation = image_federation(((2, 1, 1, 1),) * 12)
    _, rows = trained(federation, "fedavg", linear(), rounds=40, clients_per_round=5, local_epochs=1)
    drawn = [tuple(row.clients) for row in rows]
    assert all(len(set(clients)) == 5 and clients == tuple(sorted(clients)) for clients in drawn)
    assert len(set(drawn)) > 30
    assert {client for clients in drawn for client in clients} == set(range(12))


def test_every_method_meets_the_same_clients() -> None:
    federation = image_federation()
    met = {}
    for method in (name for name, entry in METHODS.items() if entry.trains_clients and name != "centralised"):
        params = {"pkd": PKD}.get(method)
        model = linear() if make_method(method).personal is None else norm_and_dropout()
        _, rows = trained(federation, method, model, params, rounds=4, clients_per_round=2, local_epochs=1)
        met[method] = [row.clients for row in rows if row.model == "global"]
    *sampled, last = met.pop("ccvr")
    assert sampled == met["fedavg"][:-1]
    assert last == list(range(federation.clients))  # everyone takes part in a calibration
    with_server_data = federation.give_server(0.3)  # some clients have no samples left
    _, rows = trained(with_server_data, "fedavg", linear(), rounds=4, clients_per_round=2, local_epochs=1)
    assert met.pop("fedlaw") == [row.clients for row in rows]
    assert all(clients == met["fedavg"] for clients in met.values())
    other = trained(federation, "fedavg", linear(), rounds=4, clients_per_round=2, local_epochs=1, seed=1)[1]
    assert [row.clients for row in other] != met["fedavg"]


def test_all_clients_take_part_unless_told_otherwise_but_not_those_without_samples() -> None:
    federation = image_federation(((1, 1, 1, 1), (0, 0, 0, 0), (2, 0, 0, 1)))
    _, rows = trained(federation, "fedavg", linear())
    assert [row.clients for row in rows] == [[0, 2], [0, 2]]
    _, rows = trained(federation, "fedavg", linear(), clients_per_round=3)
    assert [row.clients for row in rows] == [[0, 2], [0, 2]]

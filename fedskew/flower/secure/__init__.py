"""Secure aggregation: the server learns sums over sites, but no single site's update.

The protocol is that of Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS
2017, in its variant for a dishonest server. `participant.py` has the site's side and `coordinator.py` the server's.
Neither sends messages. `site.py`, `sums.py`, `training.py` and `evaluation.py` connect them to fedskew's messages.

A session computes one sum in five steps. Each site makes its masks from two secrets: the seed of its own mask, and the
key of its pairwise masks.

    1 keys      Every site makes keys for this session, and signs them with its node key.
    2 shares    Every site splits its two secrets into shares. Every other site gets one encrypted share of each.
    3 input     Every site adds masks to its update: its own mask, and a pairwise mask for every other site.
    4 confirm   The sites whose masked updates arrived sign the list of these sites.
    5 unmask    If enough sites signed the same list, they reveal shares. For a site whose update arrived, they reveal
                shares of the seed. For a site whose update is missing, they reveal shares of the key.

The primitives come from libraries: X25519, HKDF, AES and ECDSA from `cryptography`, and Shamir's secret sharing from
PyCryptodome. Flower has its own workflow for secure aggregation, `flwr.server.workflow.SecAggWorkflow`. It is not used
here, for four reasons:

- It trusts the server's list of keys.
- It has no step 4.
- It works on one array per tensor, with a 22-bit range and stochastic rounding.
- It needs Flower's strategies.
"""

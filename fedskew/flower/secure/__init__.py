"""Secure aggregation: the server learns sums over sites, but no single site's update.

The protocol is that of Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS
2017, in its variant for a dishonest server. `participant.py` is a site's side, `coordinator.py` is the server's.
Neither sends messages. `site.py`, `sums.py`, `training.py` and `evaluation.py` connect them to fedskew's messages.

    1 keys      every site makes keys for this session, and signs them with its node key
    2 shares    every site splits its two secrets into shares, and encrypts one of each for every other site
    3 input     every site adds masks to its update: its own mask, and a pairwise mask for every other site
    4 confirm   the sites whose masked updates arrived sign the list of these sites
    5 unmask    if enough sites signed the same list, they reveal one share for each site of the session. If that site's
                update arrived, the share is of the seed of its own mask, and otherwise of the key of its pairwise masks

The primitives come from libraries: X25519, HKDF, AES and ECDSA from `cryptography`, Shamir's secret sharing from
PyCryptodome, which Flower uses for its own workflow. That workflow (`flwr.server.workflow.SecAggWorkflow`) is not used,
because it trusts the server's list of keys, has no step 4, works on one array per tensor with a 22-bit range and
stochastic rounding, and needs Flower's strategies.
"""

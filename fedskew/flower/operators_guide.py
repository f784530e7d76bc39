"""The README of a federation's app, and an example of a site's configuration."""

GUIDE = """# {name}

A Flower app that trains one model over the data of these sites: {sites}. Samples, and the state that a method keeps
between rounds, stay at the sites. What leaves a site:

{disclosures}

`pyproject.toml` holds every setting: model and training under `[tool.flwr.app.config]`, the method and its parameters
under `[…config.method]`, sites, time-outs and metrics under `[…config.federation]`, and the contract that every site's
data must meet under `[…config.contract]`.
To change one value for one run: `flwr run . --run-config "rounds=20"`. Sites that approved this app refuse that run,
unless the value is one of the few that they do not check, such as `federation.round_timeout`.

## Once: make the keys

    fedskew federate certs keys --sites {first},… --host SERVER    # for trials; prints what to use in production

## On the server

    python -m fedskew.flower.superlink --host 127.0.0.1 --port 9093 --enable-supernode-auth \\
        --database superlink.db --ssl-ca-certfile keys/ca.pem --ssl-certfile keys/server.pem \\
        --ssl-keyfile keys/server.key
    flwr supernode register keys/sites/{first}/node.pub --name {first}     # once for every site

The server knows a site by the name that its key is registered with, so a site cannot pass for another.

Flower's open-source version has no user accounts. Anyone who reaches the SuperLink's port can start runs, and so
execute code at every site that has not limited itself to approved apps. The SuperLink therefore listens on 127.0.0.1
only. Sites reach it through the reverse proxy of fedskew's docs/deploy.md, on port 9092.

## On every site

Copy `site.example.yaml` to `site.yaml`, and name the site and its data there. Then:

    fedskew federate site site.yaml --check .              # do the data meet the federation's contract?
    fedskew federate approve . site.yaml                   # from now on, the site runs approved apps only
    fedskew federate site site.yaml --check . --superlink SERVER:9092 --keys keys/sites/{first}

## To train

    fedskew federate run .

If the ServerApp or the SuperLink fails, the run resumes after the last saved round. After a reboot, the same command
resumes it. Before a run resumes, you may change how long and for how many sites the server waits, but few other
settings. The fixed settings are in `config.yaml` and `federation.json` in the run's folder. If one of them differs in
the app, the command names it and ends.

The run's folder (`federation.folder`) is on the server. `fedskew report`, `export` and `compare` read it like the
folder of any other run.
"""

SITE = """# The configuration of one site. It stays at the site.
name: {first}                 # the name under which the site's key is registered
data: data.npz                # {kind} data with inputs of shape {shape}; any form that `fedskew run --data` takes
# data: {{name: patients.csv, label: diagnosis}}
state: state                  # folder for the audit log, the privacy ledger and methods' state; back it up
# metrics: total              # the most detailed test results that this site reports: none, total or class
# keys: keys                  # folder with this site's node.key; only for secure aggregation
# packages: [hospital_models] # packages, besides fedskew and the app, whose methods and models may run here
# policy: {{methods: [fedavg], reveals: [], rounds: 200, noise: 1.0, clip: 2.0, hours: 20-6}}   # limits; see deploy.md
# device: cuda
# threads: 4
# idle: 600                   # seconds without work after which the worker frees its memory
"""

"""The text that goes with a federation's app."""

GUIDE = """# {name}

A Flower app that trains one model over the data of these sites: {sites}. Data, label counts and what a method keeps
between rounds stay where they are; `fedskew methods NAME` says what a method sends and reveals.

`pyproject.toml` holds every setting: the method and its parameters under `[tool.flwr.app.config]`, sites, time-outs
and metrics under `[…config.federation]`, and the contract that every site's data must keep under `[…config.contract]`.
One value may be set for one run: `flwr run . --run-config "rounds=20"`.

## Keys, once

    fedskew federate certs keys --sites {first},… --host SERVER    # for trials; it says what to use in earnest

## On the server

    flower-superlink --host 0.0.0.0 --port 8000 --enable-supernode-auth \\
        --ssl-ca-certfile keys/ca.pem --ssl-certfile keys/server.pem --ssl-keyfile keys/server.key
    flwr supernode register keys/sites/{first}/node.pub --name {first}     # once for every site

The name that a key is registered with is the site's name: a site cannot pass for another.

Flower's open build has no user accounts: whoever reaches this port can start runs, that is, have code executed at every
site. Beyond a trial, let it listen on 127.0.0.1 and put the reverse proxy of fedskew's docs/deploy.md in front.

## On every site

Copy `site.example.yaml` to `site.yaml`, name the site and its data there, then

    fedskew federate site site.yaml --check pyproject.toml              # are the data as the federation expects?
    fedskew federate site site.yaml --superlink SERVER:8000 --keys keys/sites/{first}

## To train

    flwr run . --stream

The run's folder (`federation.folder`) lies on the server and is a run like any other: `fedskew report`, `export` and
`compare` take it. If the server is stopped or killed, the same command goes on from the last round that was saved; with
other settings (`federation.json` there has them) it says which differ, and does not.
"""

SITE = """# One site's own configuration. It stays on the site.
name: {first}                 # as its key was registered
data: data.npz                # {kind} data with inputs of shape {shape}; any form that `fedskew run --data` takes
# data: {{name: patients.csv, label: diagnosis}}
state: state                  # what methods keep between rounds; back it up with the data
# metrics: total              # the most that this site reports of its tests: none, total or class
# packages: [hospital_models] # packages, beside fedskew and the app, whose methods and models may run here
# device: cuda
# threads: 4
# idle: 600                   # seconds without work after which the worker frees its memory
"""

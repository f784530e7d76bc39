"""The papers' protocols and tables as data, and what a rerun says about them."""

"""The papers' figures, drawn from a user's runs."""

"""The papers' figures, drawn from your own runs."""

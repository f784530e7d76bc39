"""Charts as data, which `plotly_view` and `matplotlib_view` draw."""

"""Charts as data: their values, a description and a table. `plotly_view` and `matplotlib_view` draw them."""

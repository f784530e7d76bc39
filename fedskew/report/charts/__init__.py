"""Charts as data: what they show, in words and as a table; how they look is for `plotly_view` and `matplotlib_view`."""

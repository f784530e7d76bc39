"""The sections of a report. Each module has a function that builds one section from a `Comparison`."""

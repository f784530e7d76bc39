"""The sections of a report. Most modules have a function that builds one section from a `Comparison`."""

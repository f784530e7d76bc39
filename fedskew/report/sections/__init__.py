"""The sections of a report, each a function of a setting's runs."""

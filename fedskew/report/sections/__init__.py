"""The sections of a report. Each is a function of a setting's runs."""

"""One round: its plan, aggregation, evaluation, record and the state between rounds."""

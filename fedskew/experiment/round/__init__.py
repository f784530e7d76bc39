"""The parts of a round: plan, aggregation, evaluation and record, and the state between rounds."""

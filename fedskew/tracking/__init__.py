"""Rounds told to tools that people have already: TensorBoard, MLflow, Weights & Biases; always offline."""

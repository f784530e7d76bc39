"""Log rounds to TensorBoard, MLflow or Weights & Biases, always offline."""

"""What the operator tells Prometheus: of itself, and of each job."""

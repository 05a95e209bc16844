"""A small client of the Kubernetes API: JSON objects in, JSON objects or typed errors out."""

"""Metrics of speculative decoding, each a file that `evaluate.load("evaluation/metrics/NAME.py")` takes, offline."""

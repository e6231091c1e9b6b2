"""Reports as text, JSON, Prometheus metrics and data frames."""

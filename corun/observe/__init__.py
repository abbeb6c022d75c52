"""What is seen of a running process: metrics, traces, probes, and the stages of its start."""

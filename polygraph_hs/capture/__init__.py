"""Everything that runs inside a vLLM worker. Knows nothing of lm-polygraph."""

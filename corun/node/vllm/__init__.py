"""How a node starts vLLM, keeps it to the contract and tests it. Only these files, and those of roles, touch vLLM."""

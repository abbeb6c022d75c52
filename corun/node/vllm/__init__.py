"""How a node starts vLLM, keeps it to the contract and tests it. Only these files and the role packages use vLLM."""

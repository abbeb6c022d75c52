"""The commands `corun bench …`: their options and what they print."""

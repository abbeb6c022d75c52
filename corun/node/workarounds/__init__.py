"""One file for each bug upstream that we work around, with the condition for its removal."""

"""One file for each upstream bug that we work around, with the condition for the removal of the file."""

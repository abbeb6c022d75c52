"""The SDK: how a program talks to a cluster. It must not know nodes, services or files of the command line."""

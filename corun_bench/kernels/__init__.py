"""The kernels of a device: which are measured, whether their bits depend on the batch, and how long they take."""

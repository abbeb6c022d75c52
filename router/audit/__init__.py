"""What runs a second time to be compared: audits of samples, verification, and the company that they keep."""

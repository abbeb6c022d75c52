"""Small files in the shapes of public data sets, and the recipes that made them."""

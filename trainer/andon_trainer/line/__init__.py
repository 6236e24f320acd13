"""The public object `Line`, and the parts that it is made of."""

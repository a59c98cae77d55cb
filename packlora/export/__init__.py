"""`packlora export` and `packlora merge`: adapters in other forms. No other room imports it."""

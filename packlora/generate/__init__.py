"""`packlora generate` and `packlora chat`: answers of adapters. No other room imports it."""

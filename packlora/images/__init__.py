"""Images of rows, and the models that see them. The rest of the package finds this by name: see packlora/modality.py."""

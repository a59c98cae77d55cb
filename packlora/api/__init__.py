"""The Python API: a run made of Python objects. It builds the dataclasses that a run file is read into; no other room imports
it."""

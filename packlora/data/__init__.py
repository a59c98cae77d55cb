"""From files to the samples of a job and their order: readers -> rows -> encode -> mixture -> dataset -> order.

runtime/collate.py packs them.
"""

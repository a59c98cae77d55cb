"""Reading of data files into the samples of a job and their order.

readers -> rows -> encode -> samples -> mixture -> dataset -> order; engine/collate.py packs them.
"""

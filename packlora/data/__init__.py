"""From files to the samples of a job and their order: readers -> encode -> dataset -> order. runtime/collate.py packs them."""

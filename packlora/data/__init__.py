"""From files to packed microbatch tensors: readers -> encode -> dataset -> collate."""

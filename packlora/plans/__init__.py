"""Which plans compute a layer with adapters, what they cost, and which one to use on this device."""

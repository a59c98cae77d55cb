"""Which ways of computing a layer with adapters exist, what they cost, and which one to use on this device."""

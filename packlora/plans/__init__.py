"""Plans that compute a layer with adapters: what they cost, and which one is fastest on this device."""
